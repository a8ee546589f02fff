"""Rendering of pages: nothing from a file name or a config may become markup, and a missing value is an error."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from panorgan.report.tones import heat_scale, tone

_SCRIPTS = ("page_tables.js", "page_cases.js")
PAGE_SCRIPT = '"use strict";\n' + "".join(
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in _SCRIPTS
)
"""The one script of every page: it sorts, filters, copies, and loads nothing."""

# Pages open from disk and need no network. Should a name become markup nevertheless, it can load nothing, run nothing
# and send nothing: the browser runs a script of this hash only. Colours and SVG are set by style attributes, which have
# no hash.
_HASH = base64.b64encode(hashlib.sha256(PAGE_SCRIPT.encode()).digest()).decode()
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src 'sha256-{_HASH}'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'"
)


def fill_in(
    template: str, filters: Mapping[str, Callable[..., Any]], packages: Sequence[str] = (), /, **content: Any
) -> str:
    """A page as text. Templates are those of this room, and of other packages that are named."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, package_path="") for name in ("panorgan.report", *packages)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({"quoted": shlex.quote, "tone": tone, **filters})
    environment.globals["content_security_policy"] = CONTENT_SECURITY_POLICY
    environment.globals["page_script"] = Markup(PAGE_SCRIPT)
    environment.globals["heat_scale"] = heat_scale()
    return environment.get_template(template).render(**content)
