"""Small data folders, each written as its own community writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
from dicom_files import LIVER, describe, write_segmentation, write_series

from panorgan.anatomy import Vocabulary
from panorgan.data.case import Case

SHAPE = (4, 5, 6)
ABDOMEN = Vocabulary(["liver", "liver_tumour", "spleen", "kidney_left", "kidney_right", "kidney_tumour"])
HEART = Vocabulary(["heart_right_ventricle", "heart_myocardium", "heart_left_ventricle"])


def save(path: Path, voxels: np.ndarray | None = None) -> Path:
    """A small scan, or the given voxels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = np.zeros(SHAPE, np.int16) if voxels is None else voxels
    nib.save(nib.Nifti1Image(image, np.diag([1.0, 2.0, 3.0, 1.0])), path)
    return path


def numbered(*ids: int) -> np.ndarray:
    """A label map whose first voxels hold these ids."""
    voxels = np.zeros(SHAPE, np.uint8)
    voxels.reshape(-1)[: len(ids)] = ids
    return voxels


def marks(case: Case, structure: str) -> list[bool]:
    """The first four voxels of a structure's mask."""
    return case.read_masks(case.read_image())[structure].reshape(-1)[:4].tolist()


def write_nnunet(folder: Path) -> None:
    for name in ("one", "two"):
        save(folder / "imagesTr" / f"{name}_0000.nii.gz")
        save(folder / "labelsTr" / f"{name}.nii.gz", numbered(1, 2))
    content = {
        "channel_names": {"0": "CT"},
        "labels": {"background": 0, "liver": 1, "spleen": 2},
        "file_ending": ".nii.gz",
    }
    (folder / "dataset.json").write_text(json.dumps(content))


def write_msd(folder: Path) -> None:
    pairs = []
    for name in ("hippocampus_001", "hippocampus_003"):
        save(folder / "imagesTr" / f"{name}.nii.gz")
        save(folder / "labelsTr" / f"{name}.nii.gz", numbered(1, 2))
        pairs.append({"image": f"./imagesTr/{name}.nii.gz", "label": f"./labelsTr/{name}.nii.gz"})
    content = {
        "name": "Hippocampus",
        "modality": {"0": "MRI"},
        "labels": {"0": "background", "1": "Anterior", "2": "Posterior"},
        "numTraining": 2,
        "training": pairs,
        "test": ["./imagesTs/hippocampus_002.nii.gz"],
    }
    (folder / "dataset.json").write_text(json.dumps(content))


def write_kits(folder: Path) -> None:
    for name in ("case_00000", "case_00001"):
        save(folder / name / "imaging.nii.gz")
        save(folder / name / "segmentation.nii.gz", numbered(1, 2, 3))
    save(folder / "case_00210" / "imaging.nii.gz")  # the challenge's test cases have no segmentation


def write_lits(folder: Path) -> None:
    for number in (0, 1):
        save(folder / "Training Batch 1" / f"volume-{number}.nii")
        save(folder / "Training Batch 1" / f"segmentation-{number}.nii", numbered(1, 2))


def write_acdc(folder: Path) -> None:
    for patient, end_systole in (("patient001", 12), ("patient002", 7)):
        for frame in (1, end_systole):
            save(folder / patient / f"{patient}_frame{frame:02d}.nii.gz")
            save(folder / patient / f"{patient}_frame{frame:02d}_gt.nii.gz", numbered(1, 2, 3))
        save(folder / patient / f"{patient}_4d.nii.gz", np.zeros((*SHAPE, 3), np.int16))
        (folder / patient / "Info.cfg").write_text(f"ED: 1\nES: {end_systole}\n")


def write_totalsegmentator(folder: Path) -> None:
    for name in ("s0001", "s0002"):
        save(folder / name / "ct.nii.gz")
        for organ, place in (("liver", 1), ("kidney_left", 2), ("kidney_right", 3), ("vertebrae_L1", 4), ("spleen", 0)):
            if (name, organ) != ("s0002", "kidney_left"):
                save(
                    folder / name / "segmentations" / f"{organ}.nii.gz",
                    (numbered(1, 2, 3, 4) == place).astype(np.uint8),
                )
    for name in ("s0001", "s0002"):  # an organ that is absent has an empty mask
        save(folder / name / "segmentations" / "spleen.nii.gz", numbered())


def write_bids(folder: Path) -> None:
    (folder / "derivatives" / "manual").mkdir(parents=True)
    (folder / "dataset_description.json").write_text(json.dumps({"Name": "x", "BIDSVersion": "1.9.0"}))
    (folder / "derivatives" / "manual" / "dseg.tsv").write_text("index\tname\n0\tBackground\n1\tLiver\n2\tSpleen\n")
    for subject, session in (("sub-01", "ses-1"), ("sub-01", "ses-2"), ("sub-02", "ses-1")):
        stem, place = f"{subject}_{session}", Path(subject) / session / "anat"
        save(folder / place / f"{stem}_CT.nii.gz")
        save(folder / "derivatives" / "manual" / place / f"{stem}_desc-manual_dseg.nii.gz", numbered(1, 2))


def write_csv(folder: Path) -> None:
    save(folder / "scans" / "a.nii.gz")
    save(folder / "scans" / "b.nii.gz")
    save(folder / "scans" / "c.nii.gz")
    save(folder / "masks" / "a.nii.gz", numbered(1, 2))
    save(folder / "masks" / "b.nii.gz", numbered(4, 5))
    (folder / "cases.csv").write_text(
        "case,image,label,annotated,patient\n"
        "a,scans/a.nii.gz,masks/a.nii.gz,liver=1;Spleen=2,p1\n"
        "b,scans/b.nii.gz,masks/b.nii.gz,\"kidney=4,5\",p1\n"
        "c,scans/c.nii.gz,,,p2\n"
    )  # fmt: skip


def write_dicom(folder: Path) -> None:
    for patient in ("anna", "bert"):
        series = write_series(folder / patient / "ct", np.zeros(SHAPE, np.int16), PatientID=patient)
        write_segmentation(folder / patient / "seg.dcm", series, [numbered(1) == 1], [describe(1, "Liver", LIVER)])


WRITERS: dict[str, Callable[[Path], None]] = {
    "nnunet": write_nnunet,
    "msd": write_msd,
    "kits": write_kits,
    "lits": write_lits,
    "acdc": write_acdc,
    "totalsegmentator": write_totalsegmentator,
    "bids": write_bids,
    "csv": write_csv,
    "dicom": write_dicom,
}
