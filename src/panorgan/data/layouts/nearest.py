"""For a folder that fits no layout: the layout that it nearly fits, and what it lacks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from panorgan.data.folder_contents import list_contents, subfolders
from panorgan.data.layouts.base import Layout, visible
from panorgan.errors import DataError

# A folder of a thousand patients need not be looked through to see that one of them is laid out in a known way.
_FOLDERS_TO_TRY = 10


def no_layout(folder: Path, layouts: Mapping[str, Layout]) -> DataError:
    """The error for a folder that fits none of the layouts: what lies there, and what it nearly is."""
    known = f"known layouts are {', '.join(layouts)}"
    what = "A data folder fits no layout that panorgan knows."
    if not folder.is_dir():
        why = f"it is a file, and no table of cases; {known}"
        fix = "Give the folder that holds the scans and labels, or a table with columns case,image,label,annotated."
        return DataError(what, where=str(folder), why=why, fix=fix, code="no-layout")
    contents = list_contents(folder)
    experiments = [path for path in visible(folder, "*.yaml") if _is_experiment(path)]
    return DataError(
        what,
        where=str(folder),
        why=f"it holds {contents.in_words()}; {nearest(folder, layouts) or known}",
        fix=f"The folder holds an experiment file: give {experiments[0]}."
        if experiments
        else f"'panorgan init {folder}' looks at scans and labels in any folder and drafts a table of cases "
        "(cases.csv) and an experiment file."
        if contents.files
        else "Point to the folder that holds the scans and labels.",
        code="no-layout",
    )


def _is_experiment(path: Path) -> bool:
    """Whether a file has the one section that every experiment file must have."""
    try:
        return any(line.startswith("vocabulary:") for line in path.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return False


def nearest(folder: Path, layouts: Mapping[str, Layout]) -> str:
    """`nearest is nnunet (…): it lacks dataset.json`; empty where nothing is near."""
    if inner := _within(folder, layouts):
        return inner
    for name, lacks in _LACKS.items():
        if name in layouts and (what := lacks(folder)):
            return f"nearest is {name} ({layouts[name].title}): {what}"
    return ""


def _within(folder: Path, layouts: Mapping[str, Layout]) -> str:
    """Folders in this folder that fit by themselves."""
    found = list(_fitting(islice(subfolders(folder), _FOLDERS_TO_TRY), layouts))
    if not found:
        return ""
    named = ", ".join(f"{inner.name} ({layout})" for inner, layout in found)
    return f"folders within it fit a layout, and each is a site of its own: {named}"


def _fitting(folders: Iterator[Path], layouts: Mapping[str, Layout]) -> Iterator[tuple[Path, str]]:
    for inner in folders:
        # Any DICOM file makes a tree of DICOM: a patient's folder is one as well.
        fitting = [name for name, layout in layouts.items() if name != "dicom" and layout.fits(inner)]
        if len(fitting) == 1:
            yield inner, fitting[0]


def _nnunet(folder: Path) -> str:
    there = [name for name in ("imagesTr", "labelsTr") if (folder / name).is_dir()]
    lacking = [name for name in ("imagesTr", "labelsTr") if name not in there]
    return f"it lacks {', '.join(['dataset.json', *lacking])}" if there else ""


def _totalsegmentator(folder: Path) -> str:
    if visible(folder, "*/segmentations"):
        return "next to the folders 'segmentations', there is no ct.nii.gz or mri.nii.gz"
    scans = visible(folder, "*/ct.nii.gz") + visible(folder, "*/mri.nii.gz")
    return "next to the scans there are no folders 'segmentations' with a mask per organ" if scans else ""


def _kits(folder: Path) -> str:
    if visible(folder, "*/imaging.nii.gz"):
        return "its case folders are not called case_00000"
    return "no folder case_… holds an imaging.nii.gz" if visible(folder, "case_*/*.nii*") else ""


def _lits(folder: Path) -> str:
    volumes = visible(folder, "volume*.nii*") + visible(folder, "*/volume*.nii*")
    return "scans are called volume-0.nii, and labels segmentation-0.nii" if volumes else ""


def _acdc(folder: Path) -> str:
    frames = visible(folder, "patient[0-9]*/*.nii*")
    return "scans are called patient001/patient001_frame01.nii.gz, and labels …_gt.nii.gz" if frames else ""


def _bids(folder: Path) -> str:
    if not visible(folder, "sub-*"):
        return ""
    described = (folder / "dataset_description.json").is_file()
    return "derivatives hold no …_dseg.nii.gz" if described else "it lacks dataset_description.json"


def _csv(folder: Path) -> str:
    tables = visible(folder, "*.csv") + visible(folder, "*.xlsx")
    return f"its table is called {tables[0].name}, not cases.csv" if tables else ""


# The most telling first.
_LACKS: Mapping[str, Callable[[Path], str]] = {
    "nnunet": _nnunet,
    "bids": _bids,
    "totalsegmentator": _totalsegmentator,
    "kits": _kits,
    "lits": _lits,
    "acdc": _acdc,
    "csv": _csv,
}
