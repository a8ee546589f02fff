"""Indexes a tree of DICOM files by their headers: CT and MR series, segmentations, and others."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from panorgan.data.dicom_seg import region_names, segment_names
from panorgan.data.formats import import_pydicom
from panorgan.data.rtstruct import frame_of_reference, referenced_series
from panorgan.errors import DataError

_MODALITIES = ("CT", "MR")
_TAGS = [
    "SOPClassUID", "ImageType", "Modality", "PatientID", "SeriesInstanceUID", "SeriesNumber", "SeriesDescription",
    "FrameOfReferenceUID", "NumberOfFrames", "ImagePositionPatient", "Rows", "ReferencedSeriesSequence",
    "SegmentSequence",
]  # fmt: skip
# Views to plan a scan on, by the third value of ImageType (and by what some scanners write elsewhere in it).
_LOCALISERS = {"LOCALIZER", "SCOUT", "TOPOGRAM", "SURVEY"}
# CT and MR images: one slice, several frames, and several frames made of slices.
_PICTURES = {f"1.2.840.10008.5.1.4.1.1.{kind}" for kind in ("2", "2.1", "2.2", "4", "4.1", "4.4")}
# All kinds of secondary capture (screenshots, reports) begin so.
_SECONDARY_CAPTURE = "1.2.840.10008.5.1.4.1.1.7"
# A DICOMDIR, the table of contents of a disc.
_DIRECTORY = "1.2.840.10008.1.3.10"
_UID = re.compile(r"\d+(\.\d+){4,}")

# Path, time of change, size.
_Listed = tuple[Path, int, int]


@dataclass(frozen=True)
class Series:
    """One series; `modality` is CT or MR. `uid` is empty where an anonymiser has removed it."""

    uid: str
    patient: str
    number: str
    frame_of_reference: str
    files: tuple[Path, ...]
    modality: str = ""
    description: str = ""

    @property
    def folder(self) -> Path:
        """The innermost folder that holds all of its files."""
        return Path(os.path.commonpath([path.parent for path in self.files]))


@dataclass(frozen=True)
class SegmentationFile:
    """One DICOM-SEG or RTSTRUCT file: the series it refers to, and its segments' (regions') names by number."""

    path: Path
    patient: str
    frame_of_reference: str
    refers_to: tuple[str, ...]
    names: tuple[tuple[int, str], ...]
    contours: bool = False


@dataclass(frozen=True)
class DicomTree:
    """What a folder holds. `contours` are RTSTRUCT files that outline nothing; `others` counts what else is no case.

    `problems` are files that cannot be understood; the series that they may belong to are `damaged`.
    """

    folder: Path
    series: tuple[Series, ...]
    segmentations: tuple[SegmentationFile, ...]
    contours: tuple[Path, ...]
    others: tuple[tuple[str, int], ...]
    other_uids: frozenset[str]
    problems: tuple[DataError, ...] = ()
    damaged: frozenset[Series] = frozenset()

    def series_of(self, segmentation: SegmentationFile) -> Series | None:
        """The series that a segmentation belongs to; None where that is in the tree, but is no case."""
        found = self.candidates(segmentation)
        if not found and self.other_uids & set(segmentation.refers_to):
            return None
        if len(found) != 1:
            raise DataError(
                f"A DICOM segmentation belongs to {'no' if not found else 'more than one'} series of its folder.",
                where=str(segmentation.path),
                why="the series that it refers to is not there"
                if not found
                else f"it fits {len(found)} series of patient {segmentation.patient}",
                fix="Add the series it was drawn on, or move the segmentation out of the folder."
                if not found
                else "Keep only the series it was drawn on.",
                code="several-series-fit" if found else "orphan-label",
            )
        return found[0]

    def candidates(self, segmentation: SegmentationFile) -> tuple[Series, ...]:
        """The series that a segmentation names; if it names none that is there, those that lie in the same space."""
        named = tuple(s for s in self.series if s.uid and s.uid in segmentation.refers_to)
        if named or self.other_uids & set(segmentation.refers_to):
            return named
        return tuple(
            series
            for series in self.series
            if series.patient == segmentation.patient
            and series.frame_of_reference
            and series.frame_of_reference == segmentation.frame_of_reference
        )


def is_dicom(path: Path) -> bool:
    """Whether a file begins like a DICOM file; its name does not matter."""
    try:
        with path.open("rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:
        return False


def walk_files(folder: Path) -> Iterator[Path]:
    """Every file of a tree in a stable order; hidden ones are left out, links are followed, circles are not."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if real not in seen:
            yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))
        seen.add(real)


def read_tree(folder: Path) -> DicomTree:
    """Index a tree. An unchanged tree is read only once."""
    listing = []
    for path in walk_files(folder):
        stat = path.stat() if path.exists() else None
        if stat:
            listing.append((path, stat.st_mtime_ns, stat.st_size))
    return _index(folder, tuple(listing))


class _Slices:
    """Files of one series while they are found; of their headers only the first is kept."""

    def __init__(self, path: Path, header: Any) -> None:
        self.header = header
        self.files: list[Path] = []
        self.frames, self.placed = 0, False
        self.add(path, header)

    def add(self, path: Path, header: Any) -> None:
        self.files.append(path)
        self.frames += int(header.get("NumberOfFrames") or 1)
        self.placed = self.placed or bool(header.get("ImagePositionPatient") or header.get("NumberOfFrames"))

    def no_series(self) -> str:
        """Why this is not a series; empty if it is one.

        A slice without a position among others is kept: reading the series will say so, where leaving it out would
        shorten the scan in silence.
        """
        if self.frames == 1:
            return "series of a single slice"
        return "" if self.placed else "series without positions in the patient"

    def series(self, folder: Path) -> Series:
        return Series(
            uid=str(self.header.get("SeriesInstanceUID") or ""),
            patient=_patient(self.files[0], self.header, folder),
            number=str(self.header.get("SeriesNumber") or ""),
            frame_of_reference=str(self.header.get("FrameOfReferenceUID") or ""),
            files=tuple(sorted(self.files)),
            modality=str(self.header.get("Modality") or ""),
            description=str(self.header.get("SeriesDescription") or "").strip(),
        )


class _Sorter:
    """Sorts files by their headers while a tree is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.drafts: dict[str, _Slices] = {}
        self.segmentations: list[SegmentationFile] = []
        self.contours: list[Path] = []
        self.others: Counter[str] = Counter()
        self.other_uids: set[str] = set()
        self.problems: list[DataError] = []
        # Files that cannot be understood, with what can be read of the series they belong to.
        self.unclear: list[tuple[Path, str]] = []

    def add(self, path: Path) -> None:
        """Put one file where it belongs."""
        if not is_dicom(path):
            self.others["files that are not DICOM"] += 1
            return
        header = None
        try:
            header = _header(path)
            self._sort(path, header)
        except Exception as error:  # pydicom raises many kinds, and values are understood when first asked for
            self.problems.append(_unreadable(path, error))
            self.unclear.append((path, _uid(header)))

    def _sort(self, path: Path, header: Any) -> None:
        _refuse_cut(header)
        reason, uid = _no_slice(header), _uid(header)
        # Without its UID (some anonymisers remove it), a series is what lies in one folder.
        key = uid or str(path.parent)
        if header.get("Modality") == "SEG":
            self.segmentations.append(_segmentation(path, header, self.folder))
        elif header.get("Modality") == "RTSTRUCT":
            regions = _regions(path, self.folder)
            if regions.names:
                self.segmentations.append(regions)
            else:
                self.contours.append(path)
        elif reason:
            self.others[reason] += 1
            self.other_uids.add(uid)
        elif key in self.drafts:
            self.drafts[key].add(path, header)
        else:
            self.drafts[key] = _Slices(path, header)

    def tree(self) -> DicomTree:
        """The finished index."""
        for draft in self.drafts.values():
            if draft.no_series():
                self.others[draft.no_series()] += 1
                self.other_uids.add(_uid(draft.header))
        series = tuple(draft.series(self.folder) for draft in self.drafts.values() if not draft.no_series())
        return DicomTree(
            self.folder,
            series,
            tuple(self.segmentations),
            tuple(self.contours),
            tuple(self.others.items()),
            frozenset(self.other_uids - {"", *(one.uid for one in series)}),
            tuple(self.problems),
            frozenset(one for path, uid in self.unclear for one in _may_hold(path, uid, series)),
        )


def _may_hold(path: Path, uid: str, series: tuple[Series, ...]) -> list[Series]:
    """The series that lacks an unreadable file; empty where several in its folder might."""
    named = [one for one in series if uid and one.uid == uid]
    if named:
        return named
    beside = [one for one in series if path.parent in {file.parent for file in one.files}]
    return beside if len(beside) == 1 else []


@lru_cache(maxsize=4)
def _index(folder: Path, listing: tuple[_Listed, ...]) -> DicomTree:
    import_pydicom()  # missing, it would look like a fault of every file
    sorter = _Sorter(folder)
    for path, _, _ in listing:
        sorter.add(path)
    return sorter.tree()


def _header(path: Path) -> Any:
    header = import_pydicom().dcmread(path, stop_before_pixels=True, specific_tags=_TAGS)
    _ = header.get("SegmentSequence")  # values are understood when first asked for
    return header


def _refuse_cut(header: Any) -> None:
    """Refuse a truncated file, which must not pass for something that may be left out."""
    needed = "Rows" if _kind(header) in _PICTURES else "Modality"
    if needed not in header and _kind(header) != _DIRECTORY:
        raise ValueError(f"its header has no {needed}")


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        "A DICOM file cannot be read.",
        where=str(path),
        why=f"{type(error).__name__}: {error}",
        fix="The file is damaged. Copy it again from its source, or move it out of the folder.",
        code="file-unreadable",
    )


def _uid(header: Any) -> str:
    """SeriesInstanceUID, as far as there is one."""
    return "" if header is None else str(header.get("SeriesInstanceUID") or "")


def _kind(header: Any) -> str:
    """Its SOP class."""
    return str(header.get("SOPClassUID") or header.file_meta.get("MediaStorageSOPClassUID") or "")


def _no_slice(header: Any) -> str:
    """Why a file is not a slice of a CT or MR series; empty if it is one."""
    image_type = {str(part).upper() for part in header.get("ImageType") or []}
    if header.get("Modality") not in _MODALITIES:
        return f"files of modality {header.get('Modality') or 'unknown'}"
    if _kind(header).startswith(_SECONDARY_CAPTURE):
        return "secondary captures"
    if "Rows" not in header:
        return "files without a picture"
    if image_type & _LOCALISERS:
        return "localisers"
    return ""


def _segmentation(path: Path, header: Any, folder: Path) -> SegmentationFile:
    references = header.get("ReferencedSeriesSequence") or []
    return SegmentationFile(
        path,
        _patient(path, header, folder),
        str(header.get("FrameOfReferenceUID") or ""),
        tuple(str(item.get("SeriesInstanceUID") or "") for item in references),
        tuple(segment_names(header).items()),
    )


def _regions(path: Path, folder: Path) -> SegmentationFile:
    """Contours: what belongs together lies deep within them, so all is read."""
    dataset = import_pydicom().dcmread(path)
    return SegmentationFile(
        path,
        _patient(path, dataset, folder),
        frame_of_reference(dataset),
        referenced_series(dataset),
        tuple(region_names(dataset).items()),
        contours=True,
    )


def _patient(path: Path, header: Any, folder: Path) -> str:
    """PatientID; where an anonymiser has removed it, the top folder."""
    parts = path.relative_to(folder).parts[:-1]
    return str(header.get("PatientID") or "").strip() or (parts[0] if parts else folder.resolve().name)


def case_names(tree: DicomTree) -> dict[str, Series]:
    """Every series under a name for people, the same each time: its folders, else patient and series number.

    Folders named by a UID are left out. Series that would share a name also get their number, and where that does not
    distinguish them, some letters that stand for their UID.
    """
    per_folder = Counter(series.folder for series in tree.series)
    alone = {folder for folder, count in per_folder.items() if count == 1}
    names = {}
    for series in tree.series:
        parts = [p for p in series.folder.relative_to(tree.folder).parts if not _UID.fullmatch(p)]
        if series.folder not in alone or not parts:
            parts = [series.patient, *filter(None, [series.number])]
        names[series] = _tidy("_".join(parts))
    numbered = {
        s: _tidy(f"{n}_{s.number}") if s.number and not n.endswith(f"_{s.number}") else n for s, n in names.items()
    }
    for choice in (numbered, {s: f"{name}_{_letters(s, tree.folder)}" for s, name in numbered.items()}):
        shared = {name for name, count in Counter(names.values()).items() if count > 1}
        names = {series: choice[series] if name in shared else name for series, name in names.items()}
    return {name: series for series, name in names.items()}


def _tidy(name: str) -> str:
    """Without characters that trouble file systems."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "series"


def _letters(series: Series, root: Path) -> str:
    identity = series.uid or series.folder.relative_to(root).as_posix()
    return hashlib.sha256(identity.encode()).hexdigest()[:8]
