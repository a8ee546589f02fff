"""What a person means by the scans to segment: files, folders of them, and DICOM folders with their series."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from panorgan.data.channels import Channel, read_channels
from panorgan.data.dicom import DicomTree, Series, case_names, is_dicom, read_tree
from panorgan.data.formats import ITK_ENDINGS, import_pydicom
from panorgan.data.volume import Volume, read_scan
from panorgan.data_doctor.files import Problem
from panorgan.errors import DataError, PanorganError
from panorgan.workflows.channel_files import channel_of, channels_by_name, group_files, named_files

ENDINGS = (".nii.gz", ".nii", *ITK_ENDINGS)
PICTURES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif", ".webp")
# Of so many files of a folder the first bytes are read: names do not tell whether they are slices.
_LOOKED_AT = 5


@dataclass(frozen=True)
class Scan:
    """A scan to segment: a file, or a DICOM series. The label map is named after it.

    `listed` scans lie in a folder that was given as a whole, so that not all of its files need be scans. `channels` are
    the files of a scan of several channels, of which `path` is the first.
    """

    path: Path
    name: str
    series: Series | None = None
    listed: bool = False
    doubts: tuple[Problem, ...] = ()
    channels: tuple[Channel, ...] = ()

    def read(self) -> Volume:
        """The scan with all its channels."""
        return read_channels(self.channels, self.name) if self.channels else read_scan(self.path, self.slices)

    @property
    def slices(self) -> tuple[Path, ...]:
        """The files of the series; empty for other scans."""
        return self.series.files if self.series else ()

    @property
    def modality(self) -> str:
        """CT or MR where DICOM says so."""
        return self.series.modality if self.series else ""

    @property
    def place(self) -> dict[str, str]:
        """Where it lies, for the JSON file of its prediction: the viewer finds the scan by it."""
        series = {"scan_series": self.series.uid} if self.series and self.series.uid else {}
        return {"scan_path": str(self.path.resolve()), **series}


@dataclass
class Found:
    """Scans, and how many files of each kind were left out, by folder."""

    scans: list[Scan] = field(default_factory=list)
    left_out: dict[Path, dict[str, int]] = field(default_factory=dict)


def find_scans(paths: Sequence[Path], series: Sequence[str] = (), channels: Sequence[str] = ()) -> Found:
    """All requested scans, each with a unique name; with all their `channels`, where the model has several.

    `series` chooses among DICOM series by number, description, UID or the name of the label map; all if left out.
    """
    if len(channels) > 1:
        return _find_channels(paths, channels)
    found = Found()
    for path in paths:
        found.scans += _scans_at(path, found)
    if not found.scans:
        raise _no_scans(paths, found)
    if series:
        found.scans = _chosen(found.scans, series)
    if channels:
        found.scans = _of_channel(found.scans, channels[0], found)
    found.scans = _with_unique_names(found.scans)
    return found


def _of_channel(scans: list[Scan], channel: str, found: Found) -> list[Scan]:
    """Of a folder whose files name their channels, those of the model's only one."""
    named = [scan for scan in scans if scan.listed and channel_of(scan.path, [channel]) is not None]
    for scan in scans if named else ():
        if scan.listed and scan not in named:
            others = found.left_out.setdefault(scan.path.parent, {"files of no channel": 0})
            others["files of no channel"] += 1
    return [scan for scan in scans if not scan.listed or scan in named] if named else scans


def _find_channels(paths: Sequence[Path], channels: Sequence[str]) -> Found:
    """Scans of several channels: files by their names, folders of them, or `t1=FILE t2=FILE` for one scan."""
    found = Found()
    named = named_files(paths, channels)
    if named:
        files = channels_by_name(named, channels)
        for channel in files:
            _refuse_missing(channel.path)
        found.scans.append(Scan(files[0].path, _name_of(files, channels), channels=files))
    rest = [path for path in paths if not named_files([path], channels)]
    for path in rest:
        _refuse_missing(path)
    for folder in (path for path in rest if path.is_dir()):
        inside = sorted(p for p in folder.iterdir() if p.name.endswith(ENDINGS) and not p.name.startswith("."))
        scans, others = group_files(inside, channels, leave_out=True)
        found.scans += [Scan(own[0].path, name, listed=True, channels=own) for name, own in scans.items()]
        if others:
            found.left_out[folder] = {"files of no channel": others}
    scans, _ = group_files([path for path in rest if not path.is_dir()], channels, leave_out=False)
    found.scans += [Scan(own[0].path, name, channels=own) for name, own in scans.items()]
    if not found.scans:
        raise _no_scans(paths, found, channels)
    found.scans = _with_unique_names(found.scans)
    return found


def _refuse_missing(path: Path) -> None:
    if not path.exists():
        raise DataError("A scan file is missing.", code="image-missing", where=str(path), fix="Check the path.")


def _refuse_pictures(path: Path) -> None:
    if path.name.lower().endswith(PICTURES):
        raise DataError(
            "This is a picture, not a scan.",
            code="not-a-scan",
            where=str(path),
            why="flat pictures say neither voxel size nor orientation",
            fix="Export the series as DICOM, NIfTI, MetaImage or NRRD, with all slices of a scan in one volume.",
        )


def _name_of(files: Sequence[Channel], channels: Sequence[str]) -> str:
    """`anna` for anna_t1 and anna_t2, or for t1 and t2 in a folder `anna`; else the name of the first file."""
    cases = {place[0] for file in files if (place := channel_of(file.path, channels)) is not None}
    return cases.pop() if len(cases) == 1 else _stem(files[0].path)


def _no_scans(paths: Sequence[Path], found: Found, channels: Sequence[str] = ()) -> DataError:
    others = [f"{count} {what}" for own in found.left_out.values() for what, count in own.items()]
    if channels:
        return DataError(
            "There is no scan to segment.",
            code="no-scans",
            where=", ".join(map(str, paths)),
            why=f"no file ends in {', '.join(ENDINGS)}; the model takes {', '.join(channels)}",
            fix="Name a folder of such files, or of DICOM series the folder of each: "
            + " ".join(f"{name}=FOLDER" for name in channels),
        )
    return DataError(
        "There is no scan to segment.",
        code="no-scans",
        where=", ".join(map(str, paths)),
        why=f"no series of CT or MR slices; there are {', '.join(others)}"
        if others
        else f"no file ends in {', '.join(ENDINGS)} and none is DICOM",
        fix="Name scans, or a folder that holds some (of an nnU-Net folder: imagesTs or imagesTr).",
    )


def _scans_at(path: Path, found: Found) -> list[Scan]:
    """A file, a folder of files, or the series of a DICOM folder and its subfolders."""
    _refuse_missing(path)
    if not path.is_dir():
        _refuse_pictures(path)
        return [Scan(path, _stem(path))]
    slices = _holds_slices(path)
    files = sorted(p for p in path.iterdir() if p.name.endswith(ENDINGS) and not p.name.startswith("."))
    if files and not slices:
        return [Scan(file, _stem(file), listed=True) for file in files]
    try:
        import_pydicom()
    except PanorganError:  # SimpleITK reads a single series alone
        return [Scan(path, _stem(path))] if slices else []
    tree = read_tree(path)
    if slices and not tree.series:  # such as a single slice
        return [Scan(path, _stem(path))]
    if tree.others:
        found.left_out[path] = dict(tree.others)
    return list(_series_of(tree, path, alone=slices and len(tree.series) == 1))


def _series_of(tree: DicomTree, path: Path, alone: bool) -> Iterator[Scan]:
    """One scan per series; a folder that holds the slices of one series gives it its name."""
    for name, series in case_names(tree).items():
        doubts = (_incomplete(tree),) if series in tree.damaged else ()
        yield Scan(path if alone else series.folder, _stem(path) if alone else name, series, doubts=doubts)


def _incomplete(tree: DicomTree) -> Problem:
    names = ", ".join(error.where for error in tree.problems[:3])
    return Problem(
        "series-incomplete",
        "The series may lack a slice.",
        f"a DICOM file next to it cannot be read: {names}",
        "Copy the series again from its source.",
    )


def _chosen(scans: Sequence[Scan], wanted: Sequence[str]) -> list[Scan]:
    """The series that a number, description, UID or name stands for; each must stand for one at least."""
    kept = []
    for text in wanted:
        fitting = [scan for scan in scans if scan.series and text.strip().casefold() in _names_of(scan, scan.series)]
        if not fitting:
            there = [_in_words(scan, scan.series) for scan in scans if scan.series]
            raise DataError(
                f"There is no series {text!r}.",
                code="no-such-series",
                where="--series",
                why=f"there are {'; '.join(there)}" if there else "the scans are not DICOM series",
                fix="Give its number, description, UID or name; leave --series out for all of them.",
            )
        kept += fitting
    return list(dict.fromkeys(kept))


def _names_of(scan: Scan, series: Series) -> set[str]:
    return {name.casefold() for name in (series.number, series.description, series.uid, scan.name) if name}


def _in_words(scan: Scan, series: Series) -> str:
    """`3 'Abdomen B30f' (CT, 120 files, p1_3)`."""
    title = f" {series.description!r}" if series.description else ""
    return f"{series.number or '–'}{title} ({series.modality}, {len(series.files)} files, {scan.name})"


def _with_unique_names(scans: list[Scan]) -> list[Scan]:
    # Series are often called CT, one per patient: the parent folder distinguishes them.
    twice = _repeated(scans)
    scans = [replace(s, name=f"{s.path.resolve().parent.name}_{s.name}") if s.name in twice else s for s in scans]
    if twice := _repeated(scans):
        raise DataError(
            f"Two scans have the same name: {sorted(twice)[0]}.",
            code="scan-names-clash",
            why="their label maps would overwrite each other",
            fix="Predict them into different folders.",
        )
    return scans


def _repeated(scans: Sequence[Scan]) -> set[str]:
    names = [scan.name for scan in scans]
    return {name for name in names if names.count(name) > 1}


def _holds_slices(folder: Path) -> bool:
    """Whether DICOM slices lie in a folder itself."""
    return any(is_dicom(path) for path in [path for path in sorted(folder.iterdir()) if path.is_file()][:_LOOKED_AT])


def _stem(path: Path) -> str:
    for ending in ENDINGS:
        if path.name.endswith(ending):
            return path.name.removesuffix(ending)
    return path.resolve().name if path.is_dir() else path.stem
