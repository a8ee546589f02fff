"""Hospitals with four MR sequences per case, made of a generated one, in the layouts that can have them."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np

SEQUENCES = ("t1", "t1ce", "t2", "flair")


def sequences_of(hu: np.ndarray) -> list[np.ndarray]:
    """Four images of one body that differ in what is bright, as MR sequences do; nothing is negative."""
    tissue = np.clip(hu, -200, 300).astype(np.float32)
    return [tissue + 200, 2 * np.abs(tissue - 40), 300 - tissue, np.sqrt(tissue + 200) * 10]


def write_sequences(source: Path, target: Path, layout: str) -> Path:
    """The cases of an nnU-Net folder with one channel, as a folder with four; labels and their names stay."""
    if (source / "labelsTr").is_dir():
        shutil.copytree(source / "labelsTr", target / "labelsTr")
    about = json.loads((source / "dataset.json").read_text())
    writer = {"nnunet": _write_nnunet, "msd": _write_msd, "csv": _write_table}[layout]
    scans = {path.name.removesuffix("_0000.nii.gz"): path for path in sorted((source / "imagesTr").iterdir())}
    (target / "imagesTr").mkdir(parents=True)
    writer(scans, target, about)
    return target


def _images(path: Path) -> tuple[list[np.ndarray], np.ndarray]:
    scan = nib.load(path)
    return sequences_of(scan.get_fdata(dtype=np.float32)), scan.affine


def _write_nnunet(scans: dict[str, Path], target: Path, about: dict) -> None:
    for case, path in scans.items():
        images, affine = _images(path)
        for number, image in enumerate(images):
            nib.save(nib.Nifti1Image(image, affine), target / "imagesTr" / f"{case}_{number:04d}.nii.gz")
    names = {str(number): name for number, name in enumerate(SEQUENCES)}
    (target / "dataset.json").write_text(json.dumps({**about, "channel_names": names}))


def _write_msd(scans: dict[str, Path], target: Path, about: dict) -> None:
    """The decathlon's names of the sequences, in its own order: FLAIR comes first."""
    for case, path in scans.items():
        images, affine = _images(path)
        stack = np.stack([images[3], images[0], images[1], images[2]], axis=-1)
        nib.save(nib.Nifti1Image(stack, affine), target / "imagesTr" / f"{case}.nii.gz")
    pairs = [{"image": f"./imagesTr/{case}.nii.gz", "label": f"./labelsTr/{case}.nii.gz"} for case in scans]
    modality = {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"}
    labels = {str(number): name for name, number in about["labels"].items()}
    (target / "dataset.json").write_text(json.dumps({"modality": modality, "labels": labels, "training": pairs}))


def _write_table(scans: dict[str, Path], target: Path, about: dict) -> None:
    """A column per sequence; one of them has coarser voxels, as another sequence of the same examination does."""
    annotated = ";".join(f"{name}={number}" for name, number in about["labels"].items() if number)
    with (target / "cases.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["case", *(f"image:{name}" for name in SEQUENCES), "label", "annotated"])
        for case, path in scans.items():
            images, affine = _images(path)
            files = [f"imagesTr/{case}_{name}.nii.gz" for name in SEQUENCES]
            for name, image in zip(files[:3], images, strict=False):
                nib.save(nib.Nifti1Image(image, affine), target / name)
            coarse = affine @ np.diag([1, 1, 2, 1])
            coarse[:3, 3] += affine[:3, 2] / 2
            thick = images[3][:, :, : images[3].shape[2] // 2 * 2]
            thick = (thick[:, :, ::2] + thick[:, :, 1::2]) / 2
            nib.save(nib.Nifti1Image(thick, coarse), target / files[3])
            label = f"labelsTr/{case}.nii.gz" if (target / "labelsTr").is_dir() else ""
            table.writerow([case, *files, label, annotated if label else ""])
