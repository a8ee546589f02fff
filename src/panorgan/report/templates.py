"""How pages are filled in: nothing from a file name or a config may become markup, and a missing value is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def fill_in(template: str, filters: Mapping[str, Callable[..., Any]], **content: Any) -> str:
    """A page as text."""
    environment = Environment(
        loader=PackageLoader("panorgan.report", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    return environment.get_template(template).render(**content)
