"""What a layout finds in a folder, and how its names become annotated structures.

A layout is one small file: does a folder look like this (`fits`), which scans are there (`images`), which labels are
there (`labels`). Names become organs here, once for all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from panorgan.anatomy import Vocabulary, ancestors, children, find_organ
from panorgan.cases.segments import Segment
from panorgan.errors import AnatomyError, DataError


@dataclass(frozen=True)
class FoundImage:
    """A scan in a folder. Scans of one patient must never be shared out over different splits.

    `slices` are the files of a DICOM series, where `path` is a folder that may hold other things too.
    """

    path: Path
    patient: str
    slices: tuple[Path, ...] = ()


@dataclass(frozen=True)
class FoundLabelMap:
    """One file of integers; `ids` by the names that the folder uses."""

    path: Path
    ids: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class FoundMasks:
    """One file per structure, by the names that the folder uses. A structure without a file is unknown."""

    files: Mapping[str, Path]


@dataclass(frozen=True)
class FoundSegments:
    """Segments in DICOM-SEG files, by the names that those use; lesions may have several segments of one name."""

    segments: Mapping[str, tuple[Segment, ...]]


FoundLabels = FoundLabelMap | FoundMasks | FoundSegments


@dataclass(frozen=True)
class Layout:
    """How one community lays out its data. `labels` may hold fewer cases than `images`: those are unlabelled."""

    name: str
    title: str
    fits: Callable[[Path], bool]
    images: Callable[[Path], dict[str, FoundImage]]
    labels: Callable[[Path], dict[str, FoundLabels]]


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
            raise DataError(error.what, where=where, why=error.why, fix=error.fix) from error
        absent = [structure for structure in wanted if not _covered(structure, set(organs.values()))]
        if absent:
            raise DataError(
                f"The folder does not annotate {', '.join(absent)}.",
                where=where,
                why=f"it annotates {', '.join(found) or 'nothing of the vocabulary'}",
                fix="Correct 'annotated' of this site in the experiment file.",
            )
        return {
            structure: tuple(n for n, organ in organs.items() if structure in (organ, *ancestors(organ)))
            for structure in wanted
        }

    def organ(self, name: str, where: str) -> str:
        """The organ that a name in the folder means."""
        try:
            return find_organ(self.rename.get(name, name)).name
        except AnatomyError as error:
            raise DataError(
                error.what,
                where=where,
                why=error.why,
                fix=f"{error.fix} Or say what it is with 'labels: {{{name}: <organ>}}' under the site, "
                f"or leave it out with 'ignore: [{name}]'.",
            ) from error


def _covered(structure: str, organs: set[str]) -> bool:
    """Whether the organs hold the structure itself, or all of its parts."""
    parts = children(structure, "part")
    return structure in organs or (bool(parts) and all(_covered(part, organs) for part in parts))


def missing_folder(folder: Path) -> DataError:
    """The error for a folder that is not there."""
    return DataError("The data folder does not exist.", where=str(folder), fix="Check the path in the experiment file.")
