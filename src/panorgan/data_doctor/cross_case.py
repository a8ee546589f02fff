"""Findings that need several cases: duplicates, leaks between splits, outliers, organs in too few cases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from panorgan.data_doctor.codes import finding
from panorgan.data_doctor.empty_masks import Tasks, find_empty
from panorgan.data_doctor.findings import CaseFacts, Finding, Source
from panorgan.data_doctor.plausible import STEADY

_FEW_PATIENTS = 4
_ENOUGH_SIBLINGS = 8
_NAME_EACH = 3
# Outliers must be far for this folder (robust deviations) and for any (a factor, HU), so that tight sets stay quiet.
_DEVIATIONS = 8.0
_SPACING_FACTOR = 2.0
_ORGAN_HU = 120.0
_TO_SIGMA = 1.4826


def compare_cases(
    cases: Sequence[CaseFacts], extra: Sequence[CaseFacts], sources: Sequence[Source], tasks: Tasks
) -> list[Finding]:
    """All findings over several cases. `extra` are test images that are only compared."""
    found = [
        *_duplicate_scans([*cases, *extra]),
        *_same_labels(cases),
        *_patients_across_splits(cases),
    ]
    # Sites that are parts of one folder are one population of scans.
    for folder in dict.fromkeys(facts.folder for facts in cases):
        found += _spacing_outliers([facts for facts in cases if facts.folder == folder])
    for source in sources:
        own = [facts for facts in cases if facts.site == source.site]
        found += [
            *find_empty(source, own, tasks),
            *_few_patients(source, own),
            *_intensity_outliers(source, own),
            *_mixed_modality(source, own),
        ]
    return found


def _duplicate_scans(cases: Sequence[CaseFacts]) -> Iterator[Finding]:
    """The same voxels twice; a leak where they lie in different splits."""
    for twins in _groups(cases, lambda facts: facts.content):
        if twins[0].intensity["min"] == twins[0].intensity["max"]:
            continue  # constant scans are all alike, and have a finding of their own
        splits = {facts.split for facts in twins} - {""}
        leak = len(splits) > 1 or ("imagesTs" in splits and any(not facts.split for facts in twins))
        first, *others = sorted(twins, key=lambda f: (f.split == "imagesTs", f.site, f.case))
        for other in others:
            yield finding(
                "duplicate-across-splits" if leak else "duplicate-scan",
                other.site,
                other.case,
                f"The scan is the same, voxel by voxel, as {_place(first)}.",
                f"this one is {_place(other)}" + ("; a test on it would measure memory" if leak else ""),
                f"Use one of them only: 'leave_out: [{other.patient}]' under site {other.site} in the experiment file.",
                other.image,
            )


def _same_labels(cases: Sequence[CaseFacts]) -> Iterator[Finding]:
    """The very same label for different scans: one of them belongs to another patient."""
    for twins in _groups(cases, lambda facts: facts.label_content):
        first, *others = sorted(twins, key=lambda f: (f.site, f.case))
        for other in others:
            if other.content == first.content:
                continue
            yield finding(
                "same-label-twice",
                other.site,
                other.case,
                f"The label is the same, voxel by voxel, as that of {_place(first)}.",
                "the scans are different, so one of them has the label of another patient",
                "Look at both cases in a viewer and give each its own label.",
                other.label_files[0] if other.label_files else "",
            )


def _patients_across_splits(cases: Sequence[CaseFacts]) -> Iterator[Finding]:
    for scans in _groups(cases, lambda facts: f"{facts.folder.resolve()}\n{facts.patient}"):
        splits = sorted({facts.split for facts in scans} - {""})
        if len(splits) > 1:
            first = min(scans, key=lambda f: (f.site, f.case))
            yield finding(
                "patient-across-splits",
                first.site,
                first.case,
                f"Patient {first.patient} is in several splits: {', '.join(splits)}.",
                ", ".join(sorted(_place(facts) for facts in scans)),
                "Give all scans of a patient the same patient name, and let the sites' parts share none.",
                first.image,
            )


def _few_patients(source: Source, cases: Sequence[CaseFacts]) -> Iterator[Finding]:
    """Organs in too few cases to train, validate and test on."""
    patients: dict[str, set[str]] = defaultdict(set)
    for facts in cases:
        for structure in facts.structures:
            if structure.voxels:
                patients[structure.name].add(facts.patient)
    # A label that could not be read has a finding of its own; corrected, it will count.
    unread = {facts.patient for facts in cases if facts.label_files and not facts.structures}
    few = {name: len(who) for name, who in sorted(patients.items()) if len(who | unread) < _FEW_PATIENTS}
    if few and not source.external:
        yield finding(
            "few-patients",
            source.site,
            "",
            f"Drawn in fewer than {_FEW_PATIENTS} patients: {', '.join(f'{n} ({k})' for n, k in few.items())}.",
            "training, validation and test need a patient each, and scores of one or two say little",
            "Add cases, or use the folder for testing only: 'external: true'.",
            source.folder,
            next(iter(few)),
        )


def _spacing_outliers(cases: Sequence[CaseFacts]) -> Iterator[Finding]:
    """Voxel sizes along right, front and up, as logarithms against median and MAD."""
    measured = [facts for facts in cases if facts.spacing_mm is not None]
    if len(measured) < _ENOUGH_SIBLINGS:
        return
    logs = np.log(np.array([_ras_spacing(facts) for facts in measured]))
    away = np.abs(logs - np.median(logs, axis=0))
    limit = np.maximum(np.log(_SPACING_FACTOR) + 1e-6, _DEVIATIONS * _TO_SIGMA * np.median(away, axis=0))
    usual = np.median(logs, axis=0)
    for facts, own, far in zip(measured, logs, away > limit, strict=True):
        if far.any():
            axis = int(np.argmax(far))
            direction = ("left–right", "front–back", "head–foot")[axis]
            yield finding(
                "spacing-outlier",
                facts.site,
                facts.case,
                f"Voxels measure {np.exp(own[axis]):.3g} mm {direction}, elsewhere {np.exp(usual[axis]):.3g} mm.",
                f"more than {_SPACING_FACTOR:g}-fold, and far outside of the spread of this folder",
                "Check the header; if it is right, the case is only coarser or finer than the others.",
                facts.image,
            )


def _ras_spacing(facts: CaseFacts) -> tuple[float, float, float]:
    """Spacing in the order right, front, up."""
    spacing = facts.spacing_mm or (1.0, 1.0, 1.0)
    axes = {"L": 0, "R": 0, "P": 1, "A": 1, "S": 2, "I": 2}
    turned = [0.0, 0.0, 0.0]
    for code, mm in zip(facts.orientation, spacing, strict=True):
        turned[axes[code]] = mm
    return turned[0], turned[1], turned[2]


def _intensity_outliers(source: Source, cases: Sequence[CaseFacts]) -> Iterator[Finding]:
    """CT only: an organ of steady brightness far from the same organ in the other cases."""
    medians: dict[str, list[tuple[CaseFacts, float]]] = defaultdict(list)
    for facts in cases:
        for structure in facts.structures:
            if facts.modality == "CT" and structure.name in STEADY and structure.voxels > 3:
                medians[structure.name].append((facts, structure.median))
    reported: set[str] = set()
    for name, measured in sorted(medians.items()):
        if len(measured) < _ENOUGH_SIBLINGS:
            continue
        median, limit = _robust([value for _, value in measured])
        for facts, value in measured:
            if abs(value - median) > max(_ORGAN_HU, limit) and facts.case not in reported:
                reported.add(facts.case)
                yield finding(
                    "intensity-outlier",
                    source.site,
                    facts.case,
                    f"{name} has a median of {value:.0f} HU, in the other cases about {median:.0f} HU.",
                    "no contrast phase explains such a difference",
                    "Check the scan's rescale slope and intercept, and that the label belongs to it.",
                    facts.image,
                    name,
                )


def _robust(values: Iterable[float]) -> tuple[float, float]:
    """Median, and how far from it is far."""
    numbers: NDArray[np.float64] = np.array(list(values))
    median = float(np.median(numbers))
    return median, _DEVIATIONS * _TO_SIGMA * float(np.median(np.abs(numbers - median)))


def _mixed_modality(source: Source, cases: Sequence[CaseFacts]) -> Iterator[Finding]:
    kinds = {kind: [facts for facts in cases if facts.modality == kind] for kind in ("CT", "MR")}
    if not all(kinds.values()):
        return
    rare, usual = sorted(kinds, key=lambda kind: (len(kinds[kind]), kind))
    why = f"{len(kinds[rare])} of {len(cases)} scans look like {rare}, {len(kinds[usual])} like {usual}"
    fix = "Make a folder of its own for each modality, or check the rescale of these scans."
    if len(kinds[rare]) > _NAME_EACH:
        yield finding("mixed-modality", source.site, "", "The folder mixes CT and MR.", why, fix, source.folder)
        return
    for facts in kinds[rare]:
        what = f"The scan looks like {rare} among {usual} scans."
        yield finding("mixed-modality", source.site, facts.case, what, why, fix, facts.image)


def _groups(cases: Sequence[CaseFacts], key: Callable[[CaseFacts], str]) -> list[list[CaseFacts]]:
    """Cases of the same key, where there are several; an empty key counts as none."""
    by_key: dict[str, list[CaseFacts]] = defaultdict(list)
    for facts in cases:
        if key(facts):
            by_key[key(facts)].append(facts)
    return [group for _, group in sorted(by_key.items()) if len(group) > 1]


def _place(facts: CaseFacts) -> str:
    return f"{facts.site}/{facts.case}" + (f" ({facts.split})" if facts.split else "")
