"""Ordinary folders as people keep them, in many shapes, of which one is a layout, made of generated patients."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np
import SimpleITK as sitk  # noqa: N813
from dicom_files import write_series
from rtstruct_files import outlines, write_contours

from panorgan.phantom import PhantomConfig, write_federation

ORGANS = ("liver", "spleen", "kidney_left", "kidney_right", "pancreas")
# What the integers of a label mean is known only to the person who drew it.
IDS = {"liver": 3, "spleen": 7, "kidney_left": 1, "kidney_right": 2, "pancreas": 9}


@dataclass(frozen=True)
class Patient:
    """A generated scan [X, Y, Z] and its masks, with the affine to RAS millimetres."""

    voxels: np.ndarray
    affine: np.ndarray
    masks: Mapping[str, np.ndarray]

    def label_map(self, organs: tuple[str, ...]) -> np.ndarray:
        drawn = np.zeros(self.voxels.shape, np.uint8)
        for organ in organs:
            drawn[self.masks[organ]] = IDS[organ]
        return drawn


def make_patients(folder: Path, count: int, spacing: float = 8.0) -> list[Patient]:
    """Generated patients, each with all organs."""
    site = {"name": "all", "annotated": list(ORGANS), "cases": count, "spacing_mm": [spacing] * 3, "orientation": "LPS"}
    config = PhantomConfig(organs=ORGANS, field_of_view_mm=(364, 320, 260), sites=(site,))
    place = write_federation(config, folder, plain=True)["all"]
    ids = json.loads((place / "dataset.json").read_text())["labels"]
    patients = []
    for scan in sorted((place / "imagesTr").iterdir()):
        image = nib.load(scan)
        labels = np.asarray(nib.load(place / "labelsTr" / scan.name.replace("_0000", "")).dataobj)
        masks = {organ: labels == ids[organ] for organ in ORGANS}
        patients.append(Patient(np.asarray(image.dataobj).astype(np.int16), image.affine, masks))
    return patients


def save(path: Path, voxels: np.ndarray, affine: np.ndarray) -> Path:
    """NIfTI, MetaImage or NRRD by the ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith((".nii", ".nii.gz")):
        nib.save(nib.Nifti1Image(voxels, affine), path)
        return path
    image = sitk.GetImageFromArray(np.ascontiguousarray(voxels.T))
    lps = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    image.SetDirection((lps[:3, :3] / spacing).ravel().tolist())
    sitk.WriteImage(image, str(path), useCompression=True)
    return path


Organs = tuple[str, ...]


def suffix(folder: Path, patients: list[Patient], organs: Organs) -> None:
    """pat000.nii.gz and pat000_seg.nii.gz."""
    for n, one in enumerate(patients):
        save(folder / f"pat{n:03d}.nii.gz", one.voxels, one.affine)
        save(folder / f"pat{n:03d}_seg.nii.gz", one.label_map(organs), one.affine)


def folder_per_patient(folder: Path, patients: list[Patient], organs: Organs) -> None:
    """Patient_000/ct.nii.gz and Patient_000/label.nii.gz."""
    for n, one in enumerate(patients):
        save(folder / f"Patient_{n:03d}" / "ct.nii.gz", one.voxels, one.affine)
        save(folder / f"Patient_{n:03d}" / "label.nii.gz", one.label_map(organs), one.affine)


def scans_and_masks(folder: Path, patients: list[Patient], organs: Organs) -> None:
    """scans/ and masks/ with equal names."""
    for n, one in enumerate(patients):
        save(folder / "scans" / f"{n}.nii.gz", one.voxels, one.affine)
        save(folder / "masks" / f"{n}.nii.gz", one.label_map(organs), one.affine)


def related_names(folder: Path, patients: list[Patient], organs: Organs) -> None:
    """img/img0001.mha and lbl/label1.mha."""
    for n, one in enumerate(patients):
        save(folder / "img" / f"img{n:04d}.mha", one.voxels, one.affine)
        save(folder / "lbl" / f"label{n}.mha", one.label_map(organs), one.affine)


def mask_folders(folder: Path, patients: list[Patient], organs: Organs) -> None:
    """Patient_000/scan.nii.gz and Patient_000/masks/LKIDNEY.nii.gz."""
    spelling = {"kidney_left": "LKIDNEY", "kidney_right": "RKIDNEY"}
    for n, one in enumerate(patients):
        save(folder / f"Patient_{n:03d}" / "scan.nii.gz", one.voxels, one.affine)
        for organ in organs:
            path = folder / f"Patient_{n:03d}" / "masks" / f"{spelling.get(organ, organ)}.nii.gz"
            save(path, one.masks[organ].astype(np.uint8), one.affine)


def mask_suffixes(folder: Path, patients: list[Patient], organs: Organs) -> None:
    """p1.nrrd, p1_liver.nrrd and p1_left-kidney.nrrd."""
    spelling = {"kidney_left": "left-kidney", "kidney_right": "right-kidney"}
    for n, one in enumerate(patients):
        save(folder / f"p{n}.nrrd", one.voxels, one.affine)
        for organ in organs:
            save(
                folder / f"p{n}_{spelling.get(organ, organ)}.nrrd", one.masks[organ].astype(np.uint8) * 255, one.affine
            )


def organ_folders(folder: Path, patients: list[Patient], organs: Organs) -> None:
    """images/a0.nii.gz, liver/a0.nii.gz and spleen/a0.nii.gz."""
    for n, one in enumerate(patients):
        save(folder / "images" / f"a{n}.nii.gz", one.voxels, one.affine)
        for organ in organs:
            save(folder / organ / f"a{n}.nii.gz", one.masks[organ].astype(np.uint8), one.affine)


def nnunet_without_json(folder: Path, patients: list[Patient], organs: Organs) -> None:
    """imagesTr/case_000_0000.nii.gz and labelsTr/case_000.nii.gz."""
    for n, one in enumerate(patients):
        save(folder / "imagesTr" / f"case_{n:03d}_0000.nii.gz", one.voxels, one.affine)
        save(folder / "labelsTr" / f"case_{n:03d}.nii.gz", one.label_map(organs), one.affine)


def known_layout(folder: Path, patients: list[Patient], organs: Organs) -> None:
    """nnU-Net with its dataset.json, as the layout asks."""
    nnunet_without_json(folder, patients, organs)
    labels = {"background": 0, **{organ: IDS[organ] for organ in organs}}
    (folder / "dataset.json").write_text(
        json.dumps({"channel_names": {"0": "CT"}, "labels": labels, "file_ending": ".nii.gz"})
    )


def _write_slices(folder: Path, one: Patient, patient: str):
    """An axial series [columns, rows, slices] with the patient's affine, which runs as DICOM's does."""
    spacing = tuple(float(mm) for mm in np.abs(np.diag(one.affine)[:3]))
    origin = tuple(float(x) for x in (-one.affine[0, 3], -one.affine[1, 3], one.affine[2, 3]))
    stored = np.clip(one.voxels, -1024, 3000)
    return write_series(folder, stored, origin=origin, spacing=spacing, PatientID=patient)


def dicom_and_labels(folder: Path, patients: list[Patient], organs: Organs) -> None:
    """anna/dicom/*.dcm and anna/label.nii.gz."""
    for n, one in enumerate(patients):
        _write_slices(folder / f"pid{n}" / "dicom", one, f"pid{n}")
        save(folder / f"pid{n}" / "label.nii.gz", one.label_map(organs), one.affine)


def dicom_and_contours(folder: Path, patients: list[Patient], organs: Organs) -> None:
    """anna/*.dcm with an RTSTRUCT among them."""
    for n, one in enumerate(patients):
        series = _write_slices(folder / f"pid{n}", one, f"pid{n}")
        regions = {organ: outlines(one.masks[organ]) for organ in organs}
        write_contours(folder / f"pid{n}" / "rs.dcm", series, {**regions, "PTV": []})


Shape = Callable[[Path, list[Patient], Organs], None]
SHAPES: dict[str, Shape] = {
    shape.__name__: shape
    for shape in (
        suffix,
        folder_per_patient,
        scans_and_masks,
        related_names,
        mask_folders,
        mask_suffixes,
        organ_folders,
        nnunet_without_json,
        known_layout,
        dicom_and_labels,
        dicom_and_contours,
    )
}
