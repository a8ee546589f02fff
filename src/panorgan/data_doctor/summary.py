"""A checkup in few words: findings of one kind together, one description per source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from panorgan.data_doctor.findings import CaseFacts, Checkup, Finding, Severity


@dataclass(frozen=True)
class Place:
    """Where a finding is: a case of a site, or the whole site where `case` is empty."""

    site: str
    case: str


@dataclass(frozen=True)
class Variant:
    """Findings of one code that say exactly the same, and where."""

    what: str
    why: str
    fix: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Group:
    """All findings of one code. `severity` is the worst among them."""

    code: str
    severity: Severity
    count: int
    variants: tuple[Variant, ...]

    @property
    def places(self) -> tuple[Place, ...]:
        """Every place once, in the order of the findings."""
        return tuple(dict.fromkeys(place for variant in self.variants for place in variant.places))

    @property
    def cases(self) -> int:
        """How many cases are concerned."""
        return sum(1 for place in self.places if place.case)

    @property
    def what(self) -> str:
        """The sentence that all of them share; empty when they differ."""
        return _shared([variant.what for variant in self.variants])

    @property
    def fix(self) -> str:
        """The fix that all of them share; empty when they differ."""
        return _shared([variant.fix for variant in self.variants])


@dataclass(frozen=True)
class StructureCount:
    """In how many cases a structure is annotated; in `empty` of them its mask is empty."""

    annotated: int
    empty: int


@dataclass(frozen=True)
class SourceSummary:
    """One source in numbers. Ranges are per axis, as the files store them; empty where nothing could be read."""

    site: str
    folder: Path
    layout: str
    cases: int
    patients: int
    modality: str
    spacing_mm: str
    size: str
    splits: Mapping[str, int]
    structures: Mapping[str, StructureCount]


def group_findings(findings: Sequence[Finding]) -> tuple[Group, ...]:
    """Findings by code, worst first; among equals those that concern most."""
    by_code: dict[str, list[Finding]] = {}
    for finding in findings:
        by_code.setdefault(finding.code, []).append(finding)
    groups = [_group(code, own) for code, own in by_code.items()]
    return tuple(sorted(groups, key=lambda group: (-group.severity, -group.count, group.code)))


def _group(code: str, findings: Sequence[Finding]) -> Group:
    said: dict[tuple[str, str, str], dict[Place, None]] = {}
    for finding in findings:
        words = (finding.what, finding.why, finding.fix)
        said.setdefault(words, {})[Place(finding.site, finding.case)] = None
    variants = tuple(Variant(*words, tuple(places)) for words, places in said.items())
    return Group(code, max(finding.severity for finding in findings), len(findings), variants)


def summarise_sources(checkup: Checkup) -> tuple[SourceSummary, ...]:
    """One summary per source, in the order of the checkup."""
    found = []
    for source in checkup.sources:
        cases = [case for case in checkup.cases if case.site == source.site]
        modalities = Counter(case.modality for case in cases if case.modality)
        splits = Counter(case.split for case in cases if case.split)
        found.append(
            SourceSummary(
                site=source.site,
                folder=source.folder,
                layout=checkup.layouts.get(source.site, ""),
                cases=len(cases),
                patients=len({case.patient for case in cases}),
                modality=_several(modalities),
                spacing_mm=axis_ranges([case.spacing_mm for case in cases if case.spacing_mm]),
                size=axis_ranges([case.shape for case in cases if case.shape]),
                splits={name: splits[name] for name in ("train", "validation", "test") if name in splits},
                structures=_structures(cases),
            )
        )
    return tuple(found)


def _structures(cases: Sequence[CaseFacts]) -> dict[str, StructureCount]:
    annotated = Counter(structure.name for case in cases for structure in case.structures)
    empty = Counter(s.name for case in cases for s in case.structures if not s.voxels)
    return {name: StructureCount(annotated[name], empty[name]) for name in sorted(annotated)}


def axis_ranges(values: Sequence[Sequence[float]]) -> str:
    """`0.7–0.9 × 0.7–0.9 × 5`: smallest to largest along each axis; a range in words where dimensions differ."""
    lengths = {len(value) for value in values}
    if not lengths:
        return ""
    if len(lengths) > 1:
        return "mixed: " + ", ".join(f"{length}D" for length in sorted(lengths))
    return " × ".join(_range(min(axis), max(axis)) for axis in zip(*values, strict=True))


def short_number(value: float) -> str:
    """Three significant digits, whole numbers in full: 512, 0.977, 1.5."""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.3g}"


def _range(low: float, high: float) -> str:
    first, last = short_number(low), short_number(high)
    return first if first == last else f"{first}–{last}"


def _several(counts: Mapping[str, int]) -> str:
    """`CT`, or `CT (5), MR (3)` where both occur."""
    if len(counts) < 2:
        return "".join(counts)
    return ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))


def _shared(words: Sequence[str]) -> str:
    return words[0] if len(set(words)) == 1 else ""
