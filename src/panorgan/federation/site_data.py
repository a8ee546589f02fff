"""A site's cases as its worker sees them: counted, measured, prepared, and checked for changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from panorgan.data.labels import structures_of
from panorgan.methods.protocol import Scalars
from panorgan.preparation.store import StoredCase


class SiteSource(Protocol):
    """A site's cases: counted and measured before there is a plan, prepared when there is one."""

    def counts(self) -> tuple[int, Mapping[str, int]]:
        """Number of training cases, and per structure of those that annotate it."""

    def statistics(self) -> Scalars:
        """The site's measurements for the plan (`SiteStatistics.as_numbers`); empty where nothing is measured."""

    def prepared(self, plan: Mapping[str, Any] | None) -> SiteData:
        """The cases, prepared by the plan."""

    def contents(self) -> Mapping[str, str]:
        """Per case a text that changes with its content or its split, as they are now; empty where changes are not
        checked."""


@dataclass(frozen=True)
class SiteData:
    """A site's cases, prepared for training. As a source: everything is done already."""

    train: Sequence[StoredCase]
    validation: Sequence[StoredCase] = ()
    watch: Callable[[], Mapping[str, str]] = dict
    """Reads the current content of the cases' files (`contents`)."""

    def counts(self) -> tuple[int, Mapping[str, int]]:
        """Number of training cases, and per structure of those that annotate it."""
        structures = structures_of([case.structures for case in self.train])
        return len(self.train), {s: sum(s in case.structures for case in self.train) for s in structures}

    def statistics(self) -> Scalars:
        """Empty: the plan exists."""
        return {}

    def prepared(self, plan: Mapping[str, Any] | None) -> SiteData:
        """Itself."""
        return self

    def contents(self) -> Mapping[str, str]:
        """The current content of the files."""
        return self.watch()
