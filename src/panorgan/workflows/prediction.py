"""A predicted label map, with the meaning of its integers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.anatomy import Vocabulary, catalogue
from panorgan.data_doctor.files import Problem
from panorgan.evaluation.inference import label_ids, structure_mask
from panorgan.evaluation.organ_statistics import OrganStatistics
from panorgan.workflows.outputs import NIFTI, parse_formats, write_outputs

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
    about : the names of the scan, the model and the run, and the SHA-256 of the model's weights.
    doubts : reasons to doubt the result, each with a code (docs/predict.md lists them).
    source : the files of the DICOM series that was predicted on; empty for other scans.
    organs : volume, mean intensity and completeness of each requested organ.
    """

    labels: NDArray[np.uint8]
    affine: NDArray[np.float64]
    vocabulary: Vocabulary
    about: Mapping[str, str]
    doubts: tuple[Problem, ...] = ()
    source: tuple[Path, ...] = ()
    organs: Mapping[str, OrganStatistics] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, int]:
        """The integer of each requested organ."""
        ids = label_ids(self.vocabulary)
        return {organ: ids[organ] for organ in self.organs or ids}

    def mask(self, structure: str) -> NDArray[np.bool_]:
        """The mask [X, Y, Z] of an organ, or of a union of organs such as `kidney`."""
        return structure_mask(self.labels, structure, self.vocabulary)

    def save(self, path: str | os.PathLike[str], formats: str | Sequence[str] = NIFTI) -> Path:
        """Write the label map, and a JSON file with the meaning of its integers.

        Parameters
        ----------
        path : of the NIfTI file (`.nii.gz`, `.nii`); files of other formats get the same name in the same folder.
        formats : `nifti`, `seg.nrrd` (3D Slicer), and for a DICOM series `dicom-seg`, `dicom-seg-labelmap`, `rtstruct`;
            several in a list, or with commas between them.

        Returns
        -------
        Path : the JSON file. All files appear complete, or none does.
        """
        return write_outputs(self, Path(path), parse_formats(formats))

    def describe(self) -> dict[str, Any]:
        """The meaning of the integers with SNOMED CT codes, the organs' measurements, and the doubts."""
        organs = catalogue()
        return {
            **self.about,
            "doubts": [asdict(doubt) for doubt in self.doubts],
            "labels": self.names,
            "organs": {organ: found.as_json() for organ, found in self.organs.items()},
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
