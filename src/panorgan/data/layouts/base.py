"""The types that a layout returns, and how names in a folder become annotated structures.

A layout is one small file: does a folder look like this (`fits`), which scans are there (`images`), which labels are
there (`labels`), and what is wrong with single cases (`problems`). Names become organs here, once for all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from panorgan.anatomy import Vocabulary, ancestors, children, find_organ
from panorgan.data.channels import Channel
from panorgan.data.dicom_seg import Segment
from panorgan.data.places import is_in_data_folder
from panorgan.errors import AnatomyError, DataError


@dataclass(frozen=True)
class FoundImage:
    """A scan in a folder. Scans of one patient must never be shared out over different splits.

    `slices` are the files of a DICOM series, where `path` is a folder that may hold other things too. `modality` is CT
    or MR where the data says so for each scan. `channels` are all that the scan has, by the folder's names, where the
    folder names them; `path` is the first one.
    """

    path: Path
    patient: str
    slices: tuple[Path, ...] = ()
    modality: str = ""
    channels: Mapping[str, Channel] = field(default_factory=dict)


@dataclass(frozen=True)
class FoundLabelMap:
    """One file of integers; `ids` by the names that the folder uses."""

    path: Path
    ids: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class FoundMasks:
    """One file per structure, by the names that the folder uses. A structure without a file is unknown.

    Where files were not `listed` by a person, those of structures that the catalogue lacks are left out.
    """

    files: Mapping[str, Path]
    listed: bool = False


@dataclass(frozen=True)
class FoundSegments:
    """Segments in DICOM-SEG files, by the names that those use; lesions may have several segments of one name."""

    segments: Mapping[str, tuple[Segment, ...]]


FoundLabels = FoundLabelMap | FoundMasks | FoundSegments


@dataclass(frozen=True)
class Layout:
    """A layout: how one community arranges its data in folders.

    `labels` may hold fewer cases than `images`: those are unlabelled. `problems` are errors that concern single cases,
    which `images` and `labels` then leave out, so that a check-up can go on with the others. Training refuses them.
    """

    name: str
    title: str
    fits: Callable[[Path], bool]
    images: Callable[[Path], dict[str, FoundImage]]
    labels: Callable[[Path], dict[str, FoundLabels]]
    problems: Callable[[Path], tuple[DataError, ...]] | None = None


def visible(folder: Path, pattern: str) -> list[Path]:
    """What fits the pattern, sorted, without hidden files and folders: systems leave their own notes in such."""
    return sorted(path for path in folder.glob(pattern) if not is_hidden(path, folder))


def is_hidden(path: Path, folder: Path) -> bool:
    """Whether a file, or a folder on the way to it, has a name that begins with a dot."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def named_once(paths: Iterable[Path], name_of: Callable[[Path], str]) -> tuple[dict[str, Path], dict[str, DataError]]:
    """Files by the name of their case; and by name, an error for those that several files share."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        found.setdefault(name_of(path), []).append(path)
    once = {name: own[0] for name, own in found.items() if len(own) == 1}
    return once, {name: _sharing(name, own) for name, own in sorted(found.items()) if len(own) > 1}


PairedFiles = tuple[dict[str, Path], dict[str, Path], tuple[DataError, ...]]
"""Scans and labels by case, and what is wrong with cases that are in neither."""


def paired(scans: Iterable[Path], labels: Iterable[Path], name_of: Callable[[Path], str]) -> PairedFiles:
    """Scans and labels by the name of their case; where two scans or two labels share it, the case is a problem."""
    images, twice = named_once(scans, name_of)
    masks, again = named_once(labels, name_of)
    shared = twice.keys() | again.keys()
    images, masks = ({n: path for n, path in files.items() if n not in shared} for files in (images, masks))
    return images, masks, (*twice.values(), *again.values())


def _sharing(name: str, paths: Sequence[Path]) -> DataError:
    return DataError(
        f"Several files are named as case {name}.",
        where="\n".join(str(path) for path in paths),
        why="nothing says which of them is meant",
        fix="Keep one of them, or give the others names of their own (or list the cases in a cases.csv).",
        code="case-named-twice",
    )


def refuse_ignore_label(names: Iterable[str], where: Path) -> None:
    """Refuse nnU-Net's `ignore`, which means unknown; read as background, it would be learnt as background."""
    found = [name for name in names if name.strip().lower() == "ignore"]
    if found:
        raise DataError(
            f"The label {found[0]!r} marks voxels as unknown, which panorgan does not support yet.",
            where=str(where),
            why="within a case a structure is either annotated everywhere or unknown everywhere",
            fix="Where no label file holds its id, remove it from dataset.json. Else complete these labels first, "
            "or make a copy of the folder without the cases that hold it.",
            code="ignore-label",
        )


@dataclass(frozen=True)
class LabelRules:
    """How names in a folder become structures of the vocabulary.

    Parameters
    ----------
    rename : the folder's name → organ, for names that the catalogue does not know (or knows wrongly).
    ignore : names to leave out.
    restrict : keep only these structures.
    """

    vocabulary: Vocabulary
    rename: Mapping[str, str] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    restrict: tuple[str, ...] | None = None

    def structures(self, names: Sequence[str], where: str) -> dict[str, tuple[str, ...]]:
        """Per annotated structure, the folder's names whose voxels belong to it (parts and what lies inside too)."""
        organs = {name: self.organ(name, where) for name in names if name not in self.ignore}
        try:
            found = self.vocabulary.resolve(tuple(organs.values()), ignore_unknown=True)
            wanted = found if self.restrict is None else self.vocabulary.resolve(self.restrict)
        except AnatomyError as error:
            raise DataError(error.what, where=where, why=error.why, fix=error.fix, code=error.code) from error
        absent = [structure for structure in wanted if not _covered(structure, set(organs.values()))]
        if absent:
            raise DataError(
                f"The folder does not annotate {', '.join(absent)}.",
                where=where,
                why=f"it annotates {', '.join(found) or 'nothing of the vocabulary'}",
                fix="Correct 'annotated' of this site in the experiment file.",
                code="not-annotated",
            )
        # "Use the kidneys" of a folder that separates left from right does not mean to forget which is which.
        wanted = tuple(dict.fromkeys(s for name in wanted for s in self._as_labelled(name, set(organs.values()))))
        return {
            structure: tuple(n for n, organ in organs.items() if structure in (organ, *ancestors(organ)))
            for structure in wanted
        }

    def _as_labelled(self, structure: str, organs: set[str]) -> tuple[str, ...]:
        """The structure itself where the folder labels it, else its parts where the vocabulary has them."""
        parts = children(structure, "part")
        if structure in organs or not parts or not all(part in self.vocabulary for part in parts):
            return (structure,)
        return tuple(s for part in parts for s in self._as_labelled(part, organs))

    def organ(self, name: str, where: str) -> str:
        """The organ that a name in the folder means."""
        text = self.rename.get(name, name)
        try:
            return find_organ(text).name
        except AnatomyError as error:
            raise DataError(
                f"Unknown organ {text!r}.",
                where=where,
                why=error.why,
                fix=f"{error.fix} Or say what it is with 'labels: {{{name}: <organ>}}' under the site, "
                f"or leave it out with 'ignore: [{name}]'.",
                code="unknown-name",
            ) from error

    def knows(self, name: str) -> bool:
        """Whether a name in the folder is renamed, or means an organ of the catalogue."""
        try:
            return name in self.rename or bool(find_organ(name))
        except AnatomyError:
            return False


def _covered(structure: str, organs: set[str]) -> bool:
    """Whether the organs hold the structure itself, or all of its parts."""
    parts = children(structure, "part")
    return structure in organs or (bool(parts) and all(_covered(part, organs) for part in parts))


def missing_folder(folder: Path, site: str = "") -> DataError:
    """The error for a folder that is not there, of a site where that is known."""
    return DataError(
        f"The data folder of site {site} does not exist." if site else "The data folder does not exist.",
        where=str(folder),
        fix="Check the path, in the experiment file or in the hospital's site.yaml."
        + (
            " A public data set is fetched by 'panorgan fetch', or PANORGAN_DATA says where it lies."
            if is_in_data_folder(folder)
            else ""
        ),
        code="folder-missing",
    )
