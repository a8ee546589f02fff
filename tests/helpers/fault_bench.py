"""A clean phantom folder to damage, and the register of faults (see `faults`).

A fault is a function that damages a `Bench` and says where it must be found: a case, one of several cases, or the empty
text for the whole folder. Which case is damaged, and how badly, is drawn from the seed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from panorgan.data_doctor import Source
from panorgan.phantom import PhantomConfig, PhantomSite, write_federation

ORGANS = ("liver", "spleen", "kidney_left", "kidney_right", "pancreas", "gallbladder", "stomach", "lung")
SITE = "abdomen"
Array = np.ndarray[Any, Any]
Where = str | tuple[str, ...]


def write_clean_folder(folder: Path, cases: int = 9, seed: int = 0) -> Path:
    """A clean nnU-Net folder of coarse phantoms, all organs labelled."""
    site = PhantomSite(name=SITE, annotated=ORGANS, cases=cases, spacing_mm=(8.0, 8.0, 8.0), orientation="LPS")
    return write_federation(PhantomConfig(sites=(site,), seed=seed), folder)[SITE]


class Bench:
    """A copy of the clean folder on which one fault is made."""

    def __init__(self, clean: Path, folder: Path, seed: int, cases: int = 4) -> None:
        self.folder = folder
        self.rng = np.random.default_rng(seed)
        for kind in ("imagesTr", "labelsTr"):
            (folder / kind).mkdir(parents=True)
        shutil.copy(clean / "dataset.json", folder)
        self.cases = sorted(path.name.removesuffix(".nii.gz") for path in (clean / "labelsTr").iterdir())[:cases]
        for case in self.cases:
            for path in (Path("imagesTr", f"{case}_0000.nii.gz"), Path("labelsTr", f"{case}.nii.gz")):
                shutil.copy(clean / path, folder / path)
        self.case = str(self.rng.choice(self.cases))
        self.other = str(self.rng.choice([case for case in self.cases if case != self.case]))
        self.source = Source(SITE, folder)

    @property
    def image(self) -> Path:
        return self.image_of(self.case)

    @property
    def label(self) -> Path:
        return self.label_of(self.case)

    def image_of(self, case: str) -> Path:
        return self.folder / "imagesTr" / f"{case}_0000.nii.gz"

    def label_of(self, case: str) -> Path:
        return self.folder / "labelsTr" / f"{case}.nii.gz"

    @property
    def ids(self) -> dict[str, int]:
        return dict(self.description["labels"])

    @property
    def description(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "dataset.json").read_text()))

    def describe(self, **changes: Any) -> None:
        (self.folder / "dataset.json").write_text(json.dumps(self.description | changes))

    def edit(self, path: Path, change: Callable[[Array], Array], dtype: Any = None) -> None:
        """Change the voxels of a file."""
        voxels, affine = load(path)
        changed = change(voxels.copy())
        save(path, changed.astype(dtype or voxels.dtype), affine)

    def turn(self, path: Path, change: Callable[[Array], Array]) -> None:
        """Change the affine of a file."""
        voxels, affine = load(path)
        save(path, voxels, change(affine.copy()))

    def paint(self, organ: str, change: Callable[[Array, Array], Array]) -> None:
        """Give the label's organ another mask; `change` sees the old one and the image."""
        hu, _ = load(self.image)
        number = self.ids[organ]

        def painted(labels: Array) -> Array:
            mask = change(labels == number, hu)
            labels[labels == number] = 0
            labels[mask] = number
            return labels

        self.edit(self.label, painted)

    def as_table(self, modality: str = "", **patients: str) -> None:
        """Read the folder through a cases.csv, which says nothing of the modality unless it is given."""
        table = self.folder / "table"
        table.mkdir()
        annotated = ";".join(f"{name}={number}" for name, number in self.ids.items() if number)
        rows = [
            f"{case},../imagesTr/{case}_0000.nii.gz,../labelsTr/{case}.nii.gz,{annotated},{patients.get(case, case)},"
            f"{modality}"
            for case in self.cases
        ]
        (table / "cases.csv").write_text("\n".join(["case,image,label,annotated,patient,modality", *rows]))
        self.source = replace(self.source, folder=table)

    def as_mask_files(self) -> Path:
        """Store the folder as TotalSegmentator does: one file per organ."""
        tree = self.folder / "tree"
        for case in self.cases:
            masks = tree / case / "segmentations"
            masks.mkdir(parents=True)
            shutil.copy(self.image_of(case), tree / case / "ct.nii.gz")
            labels, affine = load(self.label_of(case))
            for name, number in self.ids.items():
                if number:
                    save(masks / f"{name}.nii.gz", (labels == number).astype(np.uint8), affine)
        self.source = replace(self.source, folder=tree)
        return tree

    def as_dicom(self, **segmentation: Any) -> Path:
        """Store one case as a DICOM tree: the series `ct`, and its liver as a DICOM-SEG with these attributes."""
        pytest.importorskip("highdicom")
        pytest.importorskip("SimpleITK")
        from dicom_files import LIVER, describe, write_segmentation, write_series

        tree = self.folder / "dicom"
        (hu, affine), (labels, _) = load(self.image), load(self.label)
        x, y, z = affine[:3, 3]
        series = write_series(tree / "ct", hu, origin=(-x, -y, z), spacing=(8.0, 8.0, 8.0), PatientID=self.case)
        liver = [labels == self.ids["liver"]]
        write_segmentation(tree / "seg.dcm", series, liver, [describe(1, "Liver", LIVER)], **segmentation)
        self.source = replace(self.source, folder=tree, external=True)
        return tree


def load(path: Path) -> tuple[Array, Array]:
    """Voxels and affine."""
    image = nib.load(path)
    return np.asanyarray(image.dataobj), np.asarray(image.affine)


def save(path: Path, voxels: Array, affine: Array) -> None:
    """As the phantom writes: both forms set, millimetres."""
    image = nib.Nifti1Image(voxels, affine)
    image.set_qform(affine, code=1)
    image.set_sform(affine, code=1)
    image.header.set_xyzt_units("mm")
    nib.save(image, path)


@dataclass(frozen=True)
class Fault:
    """`codes` must all be found where `damage` says; no other error may be."""

    name: str
    codes: tuple[str, ...]
    damage: Callable[[Bench], Where]
    cases: int = 4


FAULTS: dict[str, Fault] = {}


def fault(*codes: str, cases: int = 4) -> Callable[[Callable[[Bench], Where]], Callable[[Bench], Where]]:
    """Register a function as a fault that must be found under these codes."""

    def register(damage: Callable[[Bench], Where]) -> Callable[[Bench], Where]:
        FAULTS[damage.__name__] = Fault(damage.__name__, codes, damage, cases)
        return damage

    return register
