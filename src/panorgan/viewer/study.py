"""What the viewer shows: cases, each with one or several pictures of a scan and labels side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

from panorgan.anatomy import Organ, find_organ
from panorgan.data.case import MaskSource
from panorgan.errors import AnatomyError, DataError, did_you_mean

Kind = Literal["run", "comparison", "prediction", "folder", "doctor"]


@dataclass(frozen=True)
class Scan:
    """A scan's file, or folder; `slices` are the files of a DICOM series."""

    path: Path
    slices: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Pane:
    """One picture: a scan with labels over it. `reference` labels can also be drawn as outlines over the others."""

    title: str
    scan: Scan
    labels: MaskSource | None = None
    reference: bool = False
    dice: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Remark:
    """A finding of the doctor or a doubt of predict. `at_mm` is where to look (RAS), if that is known."""

    code: str
    severity: str
    text: str
    organ: str = ""
    at_mm: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class ViewedCase:
    """One case. `group` is its site or folder; `ct` says whether values are HU, None where that is not known."""

    name: str
    panes: tuple[Pane, ...]
    group: str = ""
    note: str = ""
    ct: bool | None = None
    remarks: tuple[Remark, ...] = ()

    @property
    def dice(self) -> dict[str, float]:
        """Per organ, the mean over the panes that have one."""
        organs = dict.fromkeys(organ for pane in self.panes for organ in pane.dice)
        return {organ: fmean(pane.dice[organ] for pane in self.panes if organ in pane.dice) for organ in organs}


@dataclass(frozen=True)
class Study:
    """Everything that one `panorgan view` shows.

    `page` is a page of panorgan that belongs to it. `added` are organs that an experiment has added to the catalogue.
    """

    title: str
    kind: Kind
    cases: tuple[ViewedCase, ...]
    page: Path | None = None
    organs: tuple[str, ...] = ()
    added: Mapping[str, Organ] = field(default_factory=dict)

    def organ_names(self) -> tuple[str, ...]:
        """Every organ that some case holds, those of the vocabulary first."""
        drawn = (name for case in self.cases for pane in case.panes if pane.labels for name in pane.labels.structures)
        return tuple(dict.fromkeys([*self.organs, *sorted({known_name(name) for name in drawn} - set(self.organs))]))

    def index_of(self, case: str) -> int:
        """The place of a case by its name, or by `group/name` where two groups share it."""
        in_full = [f"{viewed.group}/{viewed.name}" if viewed.group else viewed.name for viewed in self.cases]
        if case in in_full:
            return in_full.index(case)
        named = [number for number, viewed in enumerate(self.cases) if viewed.name == case]
        if len(named) == 1:
            return named[0]
        if named:
            raise DataError(
                f"There are several cases {case!r}.",
                code="case-not-unique",
                where=self.title,
                why=f"there are {', '.join(in_full[number] for number in named)}",
                fix="Name one of them in full.",
            )
        known = [viewed.name for viewed in self.cases]
        raise DataError(
            f"There is no case {case!r} to show.",
            code="no-such-case",
            where=self.title,
            why=did_you_mean(case, known) or f"there are {', '.join(known[:10])}{' …' if len(known) > 10 else ''}",
            fix="Name one of them, or leave --case out.",
        )

    def organ_of(self, name: str) -> str:
        """The organ of that name; an error where no case has it."""
        organ = known_name(name)
        if organ in self.organ_names():
            return organ
        raise DataError(
            f"There is no organ {name!r} to show.",
            code="no-such-organ",
            where=self.title,
            why=did_you_mean(name, self.organ_names()) or f"there are {', '.join(self.organ_names()) or 'no labels'}",
            fix="Name one of them, or leave --organ out.",
        )


def known_name(name: str) -> str:
    """The catalogue's name of an organ; a name outside the catalogue stays as it is."""
    try:
        return find_organ(name).name
    except AnatomyError:
        return name


def finite(scores: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Without organs whose score is undefined."""
    return {organ: value for organ, value in scores if math.isfinite(value)}
