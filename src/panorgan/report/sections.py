"""Sections of a run's page that only one method has. The method names their module."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from panorgan.data.case import Case
from panorgan.errors import ConfigError, PanorganError
from panorgan.methods.registry import find_method
from panorgan.report.overlays import CaseKey
from panorgan.workflows.run import Run

Drawn = TypeVar("Drawn")


@dataclass(frozen=True)
class MethodSection:
    """A section: its anchor and heading, a template of the method's own package, and its values.

    The template gets the section as `section`, and all values of the page.
    """

    anchor: str
    heading: str
    package: str
    template: str
    content: Mapping[str, Any]


def method_section(run: Run, cases: Callable[[], Mapping[CaseKey, Case]]) -> MethodSection | None:
    """The section that the run's method adds to the page; `cases` are the scored ones, read on demand."""
    try:
        module = find_method(run.manifest["experiment"]["method"]["name"]).report_section
    except ConfigError:  # a method that is not installed here
        return None
    if not module:
        return None
    made: MethodSection | None = importlib.import_module(module).section(run, cases)
    return made


def try_to_draw(draw: Callable[[], Drawn]) -> tuple[Drawn | None, str]:
    """Pictures, or the reason why there are none: a report without them is still a report."""
    try:
        return draw(), ""
    except (PanorganError, OSError) as error:
        # The place of the error may be a path of another machine; the sentence is enough.
        reason = error.what if isinstance(error, PanorganError) else "A file cannot be read."
        return None, f"The scans of this run cannot be shown: {reason[0].lower()}{reason[1:]}"
