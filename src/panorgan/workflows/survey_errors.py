"""Why no experiment can be drafted from a folder, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from panorgan.data.file_roles import chunks_of
from panorgan.data.folder_contents import ARRAYS, PICTURES, FolderContents, without_ending
from panorgan.errors import DataError
from panorgan.workflows.label_files import LabelFile

_SOME = 3


def not_a_folder(folder: Path) -> DataError:
    """Nothing there, or a file."""
    return DataError(
        "This is not a folder." if folder.exists() else "There is no such folder.",
        code="path-missing",
        where=str(folder),
        fix="Give the folder that holds a site's scans and labels." if folder.exists() else "Check the path.",
    )


def no_scans(folder: Path, contents: FolderContents, layout: str = "", labels: Sequence[Path] = ()) -> DataError:
    """No volumes at all, only pictures, or only labels."""
    if labels:
        why = f"all {len(labels)} volumes look like labels (such as {_relative(labels, folder)})"
        fix = "Give the folder that holds the scans as well; if they lie elsewhere, list both in a cases.csv."
    elif PICTURES in contents.files and not contents.volumes:
        why = f"it holds {contents.in_words()}; flat pictures say neither voxel size nor orientation"
        fix = "Export the series as DICOM, NIfTI, MetaImage or NRRD, with all slices of a scan in one volume."
    elif ARRAYS in contents.files:
        why = f"it holds {contents.in_words()}; arrays say neither voxel size nor orientation"
        fix = "Export the scans as NIfTI, MetaImage, NRRD or DICOM."
    else:
        why = f"it holds {contents.in_words()}" + (f", and layout {layout} lists none" if layout else "")
        fix = "Point to the folder that holds the scans: NIfTI, MetaImage, NRRD or DICOM series."
    return DataError("The folder holds no scans.", where=str(folder), why=why, fix=fix, code="no-scans")


def no_labels(folder: Path, scans: Sequence[Path], layout: str = "") -> DataError:
    """Only scans."""
    where = f", and layout {layout} finds no label of any" if layout else ", and none of them looks like a label"
    count = f"{len(scans)} scan{'s' * (len(scans) != 1)}"
    return DataError(
        "The folder holds scans and no labels.",
        where=str(folder),
        why=f"it holds {count} (such as {_relative(scans, folder)}){where}",
        fix="Give the folder that holds both. Scans alone can be segmented with a finished model: 'panorgan predict'.",
        code="no-labels",
    )


def nothing_paired(folder: Path, scans: Sequence[Path], labels: Sequence[Path]) -> DataError:
    """Names that agree nowhere."""
    return DataError(
        "No label can be matched to a scan.",
        where=str(folder),
        why=f"the names of scans ({_relative(scans, folder)}) and labels ({_relative(labels, folder)}) agree in no "
        "case name or number",
        fix="Name a scan and its label alike, such as pat01.nii.gz and pat01_seg.nii.gz, or list them in a cases.csv: "
        "case,image,label,annotated.",
        code="nothing-paired",
    )


def several_files_fit(folder: Path, unclear: Sequence[tuple[str, tuple[Path, ...]]]) -> DataError:
    """Several scans for a label, or several labels for a scan."""
    name, paths = unclear[0]
    stems = [chunks_of(without_ending(path)) for path in paths]
    words = [word for stem in stems for word in stem if sum(word in other for other in stems) == 1]
    return DataError(
        "Several files fit every case.",
        where=str(folder),
        why=f"for example {name}: {_relative(paths, folder)}",
        fix="Say which to take by a word in its name: --scan-file WORD, or --label-file WORD"
        + (f"; here {', '.join(dict.fromkeys(words))}." if words else "."),
        code="several-files-fit",
    )


def folder_of_sites(folder: Path, sites: Sequence[str]) -> DataError:
    """Folders that each look like a site."""
    folders = " ".join(str(folder / site) for site in sites)
    return DataError(
        "The folder seems to hold several sites.",
        where=str(folder),
        why=f"each of {', '.join(sites)} holds several scans with labels",
        fix=f"Give one folder per site: panorgan init {folders}. If they are one hospital's, add --one-site.",
        code="folder-of-sites",
    )


def unusable_labels(files: Sequence[LabelFile]) -> DataError:
    """Label files that are none."""
    return DataError(
        "None of the label files can be used.",
        where=str(files[0].path),
        why=files[0].trouble,
        fix="Export them again as label maps of whole numbers (nearest-neighbour interpolation), 0 for background.",
        code="labels-not-usable",
    )


def _relative(paths: Sequence[Path], folder: Path) -> str:
    """The first few paths below the folder."""
    names = [str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path) for path in paths[:_SOME]]
    return ", ".join(names) + (" …" if len(paths) > _SOME else "")
