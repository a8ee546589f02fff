"""Rendering of pages: nothing from a file name or a config may become markup, and a missing value is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

# Pages open from disk, need no network and run no script. Should a name become markup nevertheless, it can load
# nothing, run nothing and send nothing. Colours and SVG are set by style attributes, which have no hash.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
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
    environment.filters.update(filters)
    environment.globals["content_security_policy"] = CONTENT_SECURITY_POLICY
    return environment.get_template(template).render(**content)
