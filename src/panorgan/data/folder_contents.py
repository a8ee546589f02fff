"""The content of an ordinary folder by kind of file: volumes, DICOM, flat pictures and others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from panorgan.data.dicom import is_dicom, walk_files
from panorgan.data.formats import ITK_ENDINGS

VOLUME_ENDINGS = (".nii.gz", ".nii", *ITK_ENDINGS)
_KINDS: Mapping[str, tuple[str, ...]] = {
    "NIfTI": (".nii.gz", ".nii"),
    "MetaImage": (".mha", ".mhd"),
    "NRRD": (".nrrd", ".nhdr"),
    "picture": (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".gif", ".webp"),
    "array": (".npy", ".npz", ".mat", ".h5", ".hdf5"),
    "table or text": (
        ".csv",
        ".tsv",
        ".xlsx",
        ".xls",
        ".json",
        ".txt",
        ".md",
        ".yaml",
        ".yml",
        ".xml",
        ".pdf",
        ".html",
    ),
    # Voxels of a MetaImage or NRRD header.
    "raw data": (".raw", ".zraw", ".raw.gz", ".img"),
}
VOLUMES = ("NIfTI", "MetaImage", "NRRD")
DICOM, PICTURES, ARRAYS, OTHER = "DICOM", "picture", "array", "other"


@dataclass(frozen=True)
class FolderContents:
    """Files below a folder by kind, in a stable order; hidden ones are left out."""

    folder: Path
    files: Mapping[str, tuple[Path, ...]]

    @property
    def volumes(self) -> tuple[Path, ...]:
        """Files that hold a scan or a label map each."""
        return tuple(sorted(path for kind in VOLUMES for path in self.files.get(kind, ())))

    def in_words(self) -> str:
        """`12 NIfTI files (such as pat000.nii.gz) and 3 picture files (…)`."""
        parts = [
            f"{len(paths)} {kind} file{'s' * (len(paths) != 1)} (such as {paths[0].relative_to(self.folder)})"
            for kind, paths in self.files.items()
        ]
        return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts) or "no files"


def list_contents(folder: Path) -> FolderContents:
    """Every file of a folder and its subfolders, sorted by kind; only files without a known ending are opened."""
    found: dict[str, list[Path]] = {}
    for path in walk_files(folder):
        found.setdefault(_kind(path), []).append(path)
    order = [*_KINDS, DICOM, OTHER]
    return FolderContents(folder, {kind: tuple(found[kind]) for kind in order if kind in found})


def subfolders(folder: Path) -> Iterator[Path]:
    """Folders directly within a folder, without hidden ones."""
    yield from sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def without_ending(path: Path) -> str:
    """The name of a volume without its ending."""
    for ending in VOLUME_ENDINGS:
        if path.name.lower().endswith(ending):
            return path.name[: -len(ending)]
    return path.name


def _kind(path: Path) -> str:
    name = path.name.lower()
    for kind, endings in _KINDS.items():
        if name.endswith(endings):
            return kind
    return DICOM if is_dicom(path) else OTHER
