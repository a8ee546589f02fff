"""The formats that a prediction is written in: one entry each, and one file for each writer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from panorgan.data.volume import write_labels
from panorgan.errors import DataError, did_you_mean
from panorgan.federation.files import write_atomically
from panorgan.workflows.outputs.dicom_identity import import_highdicom
from panorgan.workflows.outputs.source_series import read_headers

if TYPE_CHECKING:
    from panorgan.workflows.prediction import Prediction

NIFTI = "nifti"
_NIFTI_ENDINGS = (".nii.gz", ".nii")


def _write_nifti(path: Path, prediction: Prediction) -> None:
    write_labels(path, prediction.labels, prediction.affine)


def _later(module: str, function: str) -> Callable[[Path, Prediction], None]:
    """A writer whose libraries are imported when it is used."""

    def write(path: Path, prediction: Prediction) -> None:
        getattr(import_module(f"{__package__}.{module}"), function)(path, prediction)

    return write


@dataclass(frozen=True)
class Format:
    """How a prediction can be written; `is_dicom` ones need the DICOM series that was predicted on."""

    ending: str
    write: Callable[[Path, Prediction], None]
    is_dicom: bool = False


FORMATS: Mapping[str, Format] = {
    NIFTI: Format(".nii.gz", _write_nifti),
    "dicom-seg": Format(".seg.dcm", _later("dicom_seg", "write_binary"), is_dicom=True),
    "dicom-seg-labelmap": Format(".labelmap.dcm", _later("dicom_seg", "write_labelmap"), is_dicom=True),
    "rtstruct": Format(".rtstruct.dcm", _later("rtstruct", "write_rtstruct"), is_dicom=True),
    "seg.nrrd": Format(".seg.nrrd", _later("slicer_nrrd", "write_seg_nrrd")),
}


def parse_formats(text: str | Sequence[str]) -> tuple[str, ...]:
    """Names of formats, each once; `text` may hold several with commas between them."""
    parts = text.split(",") if isinstance(text, str) else text
    names = tuple(dict.fromkeys(part.strip().lower() for part in parts if part.strip()))
    for name in names:
        if name not in FORMATS:
            raise DataError(
                f"There is no format {name!r}.",
                code="unknown-format",
                where="--format",
                fix=f"{did_you_mean(name, FORMATS)} Choose among {', '.join(FORMATS)}.".strip(),
            )
    if not names:
        raise DataError(
            "No format is named.", code="unknown-format", where="--format", fix=f"Name {', '.join(FORMATS)}."
        )
    return names


def check_source(formats: Sequence[str], files: Sequence[Path]) -> None:
    """Refuse what cannot be written in these formats, before time is spent on predicting it."""
    if any(FORMATS[name].is_dicom for name in formats):
        read_headers(files)
    if {"dicom-seg", "dicom-seg-labelmap"} & set(formats):
        import_highdicom()


def output_files(path: Path, formats: Sequence[str]) -> dict[str, Path]:
    """The file of each format: NIFTI at `path`, the others next to it under the same name."""
    stem = stem_of(path, NIFTI in formats)
    files = {name: path.with_name(stem + FORMATS[name].ending) for name in formats}
    return {**files, NIFTI: path} if NIFTI in formats else files


def side_file(path: Path) -> Path:
    """The JSON file that says what is in the others."""
    return path.with_name(f"{stem_of(path, False)}.json")


def stem_of(path: Path, is_nifti: bool) -> str:
    """The name without its ending; a NIfTI file must have one of NIfTI's."""
    for ending in (*_NIFTI_ENDINGS, *(() if is_nifti else (one.ending for one in FORMATS.values()))):
        if path.name.endswith(ending) and path.name != ending:
            return path.name.removesuffix(ending)
    if is_nifti:
        raise DataError(
            "A label map is written as NIfTI.",
            code="not-a-nifti-name",
            where=str(path),
            fix="Give a path that ends in .nii.gz.",
        )
    return path.name


def write_outputs(prediction: Prediction, path: Path, formats: Sequence[str]) -> Path:
    """Write all formats, or none where one fails, and the JSON file, whose path is returned."""
    files = output_files(path, formats)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = {name: file.with_name(f".incomplete-{file.name}") for name, file in files.items()}
    try:
        for name, place in scratch.items():
            FORMATS[name].write(place, prediction)
        for name, place in scratch.items():
            place.replace(files[name])
    finally:
        for place in scratch.values():
            place.unlink(missing_ok=True)
    side = side_file(path)
    write_atomically(side, json.dumps(prediction.describe(), indent=1))
    return side
