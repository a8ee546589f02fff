"""A tree of DICOM files: CT and MR series with labels as DICOM-SEG or contours (RTSTRUCT), or as NIfTI next to them.

Folders may be laid out in any way; headers say what belongs together. A series is a case. Where a patient has labels,
only the series they were drawn on are cases. Label maps are found in three places, and `labels.json` at the root,
`{"labels": {"liver": 1, "spleen": 2}}`, names their integers:

- next to the folder of a series: `patient1/ct/…` and `patient1/ct.nii.gz`
- in `segmentations` next to it: `patient1/segmentations/ct.nii.gz`
- in `labels` at the root, by the name of the case: `labels/patient1_ct.nii.gz`
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from panorgan.data.dicom import DicomTree, SegmentationFile, Series, case_names, is_dicom, read_tree, walk_files
from panorgan.data.dicom_seg import Segment
from panorgan.data.folder_contents import VOLUME_ENDINGS
from panorgan.data.layouts.base import FoundImage, FoundLabelMap, FoundLabels, FoundSegments, Layout
from panorgan.errors import DataError

_LABEL_ENDINGS = (".nii.gz", ".nii", ".mha", ".nrrd")
# Folders with such a file say themselves which scans they hold; DICOM among them is their source.
_OTHER_LAYOUTS = ("cases.csv", "dataset.json", "dataset_description.json")
_NEVER_DICOM = (*_LABEL_ENDINGS, ".json", ".csv", ".tsv", ".txt", ".md", ".xml", ".pdf", ".png", ".jpg")
# A tree is recognised by one of its first files.
_FILES_TO_TRY = 50


def fits(folder: Path) -> bool:
    """One of the first files is DICOM, and no table says that the folder is something else."""
    if not folder.is_dir() or any((folder / name).is_file() for name in _OTHER_LAYOUTS):
        return False
    files = (path for path in walk_files(folder) if not path.name.lower().endswith(_NEVER_DICOM))
    return any(is_dicom(path) for path in islice(files, _FILES_TO_TRY))


def images(folder: Path) -> dict[str, FoundImage]:
    """Every series, but of a patient with labels only those series that have some."""
    tree = read_tree(folder)
    if not tree.series and not tree.problems:
        raise DataError(
            "A DICOM folder holds no CT or MR series.",
            where=str(folder),
            why="there are only: " + (", ".join(f"{n} {reason}" for reason, n in tree.others) or "no files"),
            fix="Point to the folder that holds the series, each with all of its slices.",
            code="no-scans",
        )
    cases = case_names(tree)
    found = _look_up(tree, cases)
    patients = {cases[name].patient for name in found.labelled}
    return {
        name: FoundImage(series.folder, series.patient, series.files, series.modality)
        for name, series in cases.items()
        if name not in found.left_out and (name in found.labels or series.patient not in patients)
    }


def labels(folder: Path) -> dict[str, FoundLabels]:
    """Segmentations of every series that has some."""
    tree = read_tree(folder)
    found = _look_up(tree, case_names(tree))
    if not found.labels and not found.problems and tree.contours:
        raise DataError(
            "The contours of a DICOM folder (RTSTRUCT) outline nothing.",
            where=str(tree.contours[0]),
            why="none of their regions has a closed contour",
            fix="Export the contours again, or give the labels as DICOM-SEG or NIfTI.",
            code="contours-only",
        )
    return found.labels


def unread_volumes(folder: Path, found: Mapping[str, FoundLabels]) -> tuple[Path, ...]:
    """Volumes in the tree that are no label `found` here; often one is, but its name leads to no series."""
    used = {one.path for one in found.values() if isinstance(one, FoundLabelMap)}
    return tuple(path for path in walk_files(folder) if path not in used and path.name.lower().endswith(VOLUME_ENDINGS))


def problems(folder: Path) -> tuple[DataError, ...]:
    """Files that cannot be read, and labels of which it is not certain to which series they belong."""
    tree = read_tree(folder)
    return tuple(_look_up(tree, case_names(tree)).problems)


@dataclass
class _LookedUp:
    """Labels by case; what is wrong with single cases, and the names of those.

    `labelled` are cases with any label, even if they are left out.
    """

    labels: dict[str, FoundLabels] = field(default_factory=dict)
    problems: list[DataError] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)
    labelled: set[str] = field(default_factory=set)

    def refuse(self, error: DataError, cases: Iterable[str]) -> None:
        """Leave cases out, because something is wrong with a label of theirs."""
        self.problems.append(error)
        self.left_out.update(cases)
        self.labelled.update(cases)


def _look_up(tree: DicomTree, cases: dict[str, Series]) -> _LookedUp:
    names = {series: name for name, series in cases.items()}
    found = _LookedUp(problems=list(tree.problems), left_out={names[series] for series in tree.damaged})
    segments: dict[str, dict[str, tuple[Segment, ...]]] = {}
    for file in tree.segmentations:
        try:
            series = tree.series_of(file)
            if series is None:
                continue
            own = segments.setdefault(names[series], {})
            for number, name in file.names:
                own[name] = (*own.get(name, ()), Segment(file.path, number, file.contours))
            _refuse_other_space(file, series)
        except DataError as error:
            found.refuse(error, [names[series] for series in tree.candidates(file)])
    for name, series in cases.items():
        try:
            label_map = _label_map(tree, name, series)
            if label_map and name in segments:
                raise _two_labels(series, [label_map, next(iter(segments[name].values()))[0].path])
        except DataError as error:
            found.refuse(error, [name])
            continue
        if label_map or name in segments:
            found.labelled.add(name)
        if label_map and name not in found.left_out:
            found.labels[name] = FoundLabelMap(label_map, _ids(tree.folder, label_map))
        elif name in segments and name not in found.left_out:
            found.labels[name] = FoundSegments(segments[name])
    return found


def _refuse_other_space(file: SegmentationFile, series: Series) -> None:
    """Positions mean something only within one frame of reference; in another, the organ is elsewhere."""
    ours, theirs = series.frame_of_reference, file.frame_of_reference
    if ours and theirs and ours != theirs:
        raise DataError(
            "A DICOM segmentation lies in another frame of reference than its series.",
            where=str(file.path),
            why=f"the segmentation's is {theirs}, that of {series.folder} is {ours}: positions cannot be compared",
            fix="Export both again from the program in which it was drawn. If an anonymiser has given them different "
            "UIDs, let it change both alike.",
            code="frame-of-reference",
        )


def _label_map(tree: DicomTree, name: str, series: Series) -> Path | None:
    """The label map of a series, in any of the places where it may lie."""
    stems = [tree.folder / "labels" / name]
    alone = [other.folder for other in tree.series].count(series.folder) == 1
    if alone and series.folder != tree.folder:
        beside = series.folder.parent
        stems += [beside / series.folder.name, beside / "segmentations" / series.folder.name]
    files = [path for stem in stems for ending in _LABEL_ENDINGS if (path := Path(f"{stem}{ending}")).is_file()]
    if len(files) > 1:
        raise _two_labels(series, files)
    return files[0] if files else None


def _two_labels(series: Series, files: list[Path]) -> DataError:
    return DataError(
        "A DICOM series has labels in more than one place.",
        where=str(series.folder),
        why=", ".join(str(path) for path in files),
        fix="Keep the right one and move the others out of the folder.",
        code="labels-in-several-places",
    )


def _ids(folder: Path, label_map: Path) -> dict[str, tuple[int, ...]]:
    """Ids by name, from `labels.json`."""
    path = folder / "labels.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8-sig"))
        ids = {n: tuple(i if isinstance(i, list) else [i]) for n, i in content["labels"].items() if n != "background"}
        if not all(type(i) is int and i > 0 for values in ids.values() for i in values):
            raise ValueError("ids must be whole numbers from 1 on")
        return ids
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            "The integers of label maps in a DICOM folder have no names.",
            where=str(path),
            why="the file is not there" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}",
            fix=f'Write {{"labels": {{"liver": 1, "spleen": 2}}}} into it, or move {label_map.name} away.',
            code="labels-without-names" if isinstance(error, FileNotFoundError) else "label-names-unreadable",
        ) from error


LAYOUT = Layout(
    "dicom", "a tree of DICOM files, with DICOM-SEG, RTSTRUCT or NIfTI labels", fits, images, labels, problems
)
