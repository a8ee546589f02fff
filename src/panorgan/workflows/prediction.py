"""A predicted label map, with the meaning of its integers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.anatomy import Vocabulary, catalogue
from panorgan.data.volume import write_labels
from panorgan.data_doctor.files import Problem
from panorgan.errors import DataError
from panorgan.evaluation.inference import label_ids, structure_mask
from panorgan.evaluation.organ_statistics import OrganStatistics
from panorgan.federation.files import write_atomically

_ENDINGS = (".nii.gz", ".nii")
# SNOMED CT codes of the sides, as DICOM-SEG carries them.
_LATERALITY = {
    "left": {"value": "7771000", "meaning": "Left"},
    "right": {"value": "24028007", "meaning": "Right"},
}


@dataclass(frozen=True)
class Prediction:
    """Organs found in a scan.

    Attributes
    ----------
    labels : [X, Y, Z] uint8 on the scan's own grid, 0 for background.
    affine : [4, 4] from voxel indices to RAS millimetres, that of the scan.
    vocabulary : the organs; organ i has the label i + 1.
    about : the names of the scan, the model and the run.
    doubts : what speaks against the model or the scan, each with a code (docs/predict.md lists them).
    organs : volume, mean intensity and completeness of each organ that was asked for.
    """

    labels: NDArray[np.uint8]
    affine: NDArray[np.float64]
    vocabulary: Vocabulary
    about: Mapping[str, str]
    doubts: tuple[Problem, ...] = ()
    organs: Mapping[str, OrganStatistics] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, int]:
        """The integer of each organ that was asked for."""
        ids = label_ids(self.vocabulary)
        return {organ: ids[organ] for organ in self.organs or ids}

    def mask(self, structure: str) -> NDArray[np.bool_]:
        """Where an organ is, or a union of organs such as `kidney`: [X, Y, Z]."""
        return structure_mask(self.labels, structure, self.vocabulary)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the label map as NIfTI (`.nii.gz`, `.nii`), and the meaning of its integers as JSON beside it.

        The map appears only once it is complete. Returns the path of the JSON file.
        """
        target = Path(path)
        stem = next((target.name.removesuffix(e) for e in _ENDINGS if target.name.endswith(e)), None)
        if stem is None:
            raise DataError(
                "A label map is written as NIfTI.",
                code="not-a-nifti-name",
                where=str(target),
                fix="Give a path that ends in .nii.gz.",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".incomplete-{target.name}")
        try:
            write_labels(scratch, self.labels, self.affine)
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)
        side = target.with_name(f"{stem}.json")
        write_atomically(side, json.dumps(self.describe(), indent=1))
        return side

    def describe(self) -> dict[str, Any]:
        """The meaning of the integers with SNOMED CT codes, what was measured in the organs, and the doubts."""
        organs = catalogue()
        return {
            **self.about,
            "doubts": [asdict(doubt) for doubt in self.doubts],
            "labels": self.names,
            "organs": {organ: asdict(found) for organ, found in self.organs.items()},
            "snomed": {
                organ: {"value": organs[organ].snomed_value, "meaning": organs[organ].snomed_meaning}
                for organ in self.names
                if organs[organ].snomed_value  # DICOM does not list every structure
            },
            # The code of a kidney is the same on both sides; DICOM distinguishes them by a modifier.
            "laterality": {
                organ: _LATERALITY[side] for organ in self.names if (side := organs[organ].side) in _LATERALITY
            },
        }
