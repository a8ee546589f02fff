"""Reasons to doubt that a model suits a scan. The scan is segmented anyway; the user decides.

The codes are those of the doctor where it reports the same about training data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import nibabel as nib
from numpy.typing import NDArray

from panorgan.data.volume import Volume
from panorgan.data_doctor.files import Problem
from panorgan.data_doctor.intensity import Values, check_ct, guess_modality, measure
from panorgan.data_doctor.label_like import looks_like_labels
from panorgan.preparation.plan import Plan

LABELS = "looks-like-labels"

DOUBTS = {
    LABELS: "The file is a label map, not a scan; in a folder of scans such files are left out.",
    "constant-image": "Every voxel has the same value.",
    "modality-mismatch": "The model was trained on CT and the scan is not CT, or the other way round.",
    "hu-lost": "A CT was stored as 8-bit or normalised grey values.",
    "hu-clipped": "A CT was clipped to a display window before it was stored.",
    "hu-offset": "A CT's rescale intercept was not applied, or was applied twice.",
    "hu-scale": "A CT's rescale slope is wrong: air is not near −1000 HU.",
    "hu-overflow": "A CT holds values that no scanner gives.",
    "one-slice": "The scan is a single slice, and the model was trained on volumes.",
    "series-incomplete": "A DICOM file next to the series cannot be read; the series may lack a slice.",
    "nothing-found": "No organ was found in the scan.",
    "output-replaced": "An earlier label map of the same name in `--out` was replaced.",
}
"""What each code means."""


def doubts_about(
    volume: Volume, plan: Plan, sliced: int | None, modality: str = "", channels: Sequence[str] = ()
) -> tuple[Problem, ...]:
    """Doubts about segmenting a scan with a model of this plan.

    `sliced` is the RAS axis across which the model sees slices, None for a model of volumes. `modality` is what a DICOM
    header says: CT, MR, or nothing. `channels` names the scan's, where it has several.
    """
    found: list[Problem] = []
    for name, voxels in zip(channels if volume.more else ("",), volume.channels, strict=True):
        doubt = _about_values(voxels, plan, modality)
        if doubt is not None:
            found.append(replace(doubt, what=f"Channel {name}: {doubt.what}") if name else doubt)
    if any(doubt.code in (LABELS, "constant-image") for doubt in found):
        return tuple(found)
    flat = _one_slice(volume, sliced)
    return (*found, flat) if flat is not None else tuple(found)


def _about_values(voxels: NDArray[Any], plan: Plan, modality: str) -> Problem | None:
    """The most telling doubt about the values of a scan, or of one of its channels."""
    if looks_like_labels(voxels):
        return _labels()
    values = measure(voxels)
    if values.low == values.high:
        why = f"every voxel is {values.low:.5g}"
        return Problem("constant-image", "The scan shows nothing.", why, "Export it again from its source.")
    return _against_ct(values, modality) if plan.intensity == "window" else _against_mr(values, modality)


def nothing_found() -> Problem:
    """The doubt about a label map that is empty."""
    return Problem(
        "nothing-found",
        "No organ was found in the scan.",
        "the scan shows none of the model's organs, or differs from what the model was trained on",
        "Open the scan in a viewer; check its orientation and intensities with 'panorgan doctor'.",
    )


def _labels() -> Problem:
    return Problem(
        LABELS,
        "This is a label map, not a scan.",
        "its values are a few whole numbers in large even regions",
        "Name the scan that it belongs to.",
    )


def _against_ct(values: Values, modality: str) -> Problem | None:
    """Doubts about a scan for a model that was trained on CT."""
    found = check_ct(values)
    if modality == "MR" or (found is not None and found.code == "modality-mismatch"):
        said = "its DICOM header says MR" if modality == "MR" else "it holds neither air nor fat, and looks like MR"
        return Problem(
            "modality-mismatch",
            "The model was trained on CT, and this scan is not CT.",
            f"{said}; its values run from {values.low:.5g} to {values.high:.5g}",
            "Use a model that was trained on such scans.",
        )
    return found


def _against_mr(values: Values, modality: str) -> Problem | None:
    """Doubts about a scan for a model that standardises every scan, as for modalities other than CT."""
    if modality != "CT" and (modality or guess_modality(values) != "CT"):
        return None
    said = "its DICOM header says CT" if modality else f"its air is at {values.air:.0f} HU"
    return Problem(
        "modality-mismatch",
        "The model was not made for CT, and this scan is CT.",
        f"{said}; the model's plan has 'intensity: zscore', as for MR",
        "Use a model that was trained on CT.",
    )


def _one_slice(volume: Volume, sliced: int | None) -> Problem | None:
    """A doubt about a scan with a single voxel along an axis, other than the one across which the model sees slices."""
    turned = nib.orientations.io_orientation(volume.affine)[:, 0]
    flat = [axis for axis, n in enumerate(volume.voxels.shape) if n == 1 and turned[axis] != sliced]
    if not flat:
        return None
    shape = " × ".join(str(n) for n in volume.voxels.shape)
    return Problem(
        "one-slice",
        "The scan is a single slice.",
        f"it has {shape} voxels, and the model was trained on volumes",
        "Give the whole series, or use a model with 'network.dimensions: 2'.",
    )
