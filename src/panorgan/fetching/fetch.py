"""Fetch a public data set: download, check, unpack, look at it as training will, and write down where it is from."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from panorgan.data.layouts import find_layout
from panorgan.data.layouts.base import FoundLabelMap, Layout
from panorgan.data.places import data_folder
from panorgan.errors import DataError, PanorganError
from panorgan.fetching.catalogue import DataSet
from panorgan.fetching.download import download
from panorgan.fetching.unpack import unpack

Watch = Callable[[str, int, int | None], None]
"""Gets what happens, how far it is, and how far it goes where that is known."""

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Fetched:
    """A data set on this disk. `checked` says by what it was recognised; `licence_file` lies next to its folder."""

    folder: Path
    scans: int
    checked: str
    licence_file: Path
    was_there: bool


def fetch(
    data_set: DataSet,
    to: Path | None = None,
    source: str = "",
    keep_archive: bool = False,
    watch: Watch = lambda what, done, total: None,
) -> Fetched:
    """Put a data set into the data folder; continues a download that broke off.

    Parameters
    ----------
    to : the data folder; `PANORGAN_DATA` or `data` if left out.
    source : another address of the same archive, or a file that was carried here; an archive that already lies in the
        data folder is used as well.
    keep_archive : leave the downloaded archive next to the folder.
    """
    place = (to or data_folder()).expanduser().absolute()
    folder, archive = place / data_set.folder, place / data_set.archive
    licence_file = place / f"{data_set.folder}.licence.txt"
    if folder.is_dir() and any(folder.iterdir()):
        return Fetched(folder, count_scans(data_set, folder), "structure", licence_file, was_there=True)
    if not data_set.url:
        raise by_hand(data_set, folder)
    place.mkdir(parents=True, exist_ok=True)
    lock = FileLock(place / f".{data_set.folder}.lock")
    try:
        with lock.acquire(timeout=0):
            if folder.is_dir():
                folder.rmdir()  # empty: unpacking renames over it
            given = Path(source).expanduser() if source and "://" not in source else archive
            own = not given.exists() and given == archive
            if own:
                _download(data_set, source or data_set.url, archive, folder, watch)
            checked = _check(data_set, given, own, watch)
            unpack(given, folder, lambda done: watch("unpacking", done, None))
            scans = count_scans(data_set, folder)
            licence_file.write_text(_origin(data_set, source or data_set.url, checked, scans), encoding="utf-8")
            if own and not keep_archive:
                archive.unlink()
            return Fetched(folder, scans, checked, licence_file, was_there=False)
    except Timeout as error:
        raise DataError(
            "This data set is being fetched by another process.",
            code="already-fetching",
            where=str(place),
            fix="Wait for it, or stop it.",
        ) from error


def count_scans(data_set: DataSet, folder: Path) -> int:
    """Read the folder as training would: its layout fits, and every scan and label map that it lists is there."""
    layout = find_layout(folder, data_set.layout)
    if not layout.fits(folder):
        raise _incomplete(data_set, folder, f"it is not laid out as {layout.title}")
    files = _listed(layout, folder)
    if missing := [path for path in files if not path.exists()]:
        raise _incomplete(data_set, folder, f"{len(missing)} listed files are not there, such as {missing[0].name}")
    if not files:
        raise _incomplete(data_set, folder, "it has no scans")
    return len(layout.images(folder))


def by_hand(data_set: DataSet, folder: Path) -> DataError:
    """The error for a set that panorgan does not fetch."""
    return DataError(
        f"{data_set.title} is not fetched by panorgan.",
        code="fetch-by-hand",
        where=str(folder),
        why=f"its page comes first: {data_set.page}",
        fix=data_set.how,
    )


def _listed(layout: Layout, folder: Path) -> list[Path]:
    scans = [found.path for found in layout.images(folder).values()]
    return scans + [found.path for found in layout.labels(folder).values() if isinstance(found, FoundLabelMap)]


def _download(data_set: DataSet, url: str, archive: Path, folder: Path, watch: Watch) -> None:
    try:
        download(url, archive, lambda done, total: watch("downloading", done, total))
    except PanorganError as error:
        if error.code == "server-unreachable":
            error.fix += (
                f" Without a network: download {data_set.url} on another machine, put it at {archive} (or name it with "
                f"--from FILE) and give the same command again. What is unpacked belongs into {folder}."
            )
        raise


def _check(data_set: DataSet, archive: Path, own: bool, watch: Watch) -> str:
    """By what the archive is recognised; one that is another file is refused, and removed where it was downloaded."""
    if not archive.is_file():
        raise DataError(
            "There is no such archive.",
            code="archive-missing",
            where=str(archive),
            fix="Check the path behind --from, or leave it out to download the archive.",
        )
    kind = "sha256" if data_set.sha256 else "md5" if data_set.md5 else ""
    if not kind:
        return "size and structure (no checksum of this archive is known)"
    found, expected = _digest(archive, kind, watch), getattr(data_set, kind)
    if found != expected:
        if own:
            archive.unlink()  # nothing of it can be continued
        raise DataError(
            "An archive is not the expected file.",
            code="wrong-checksum",
            where=str(archive),
            why=f"its {kind} is {found}, expected is {expected} (stated by {data_set.checksum_from})",
            fix="Fetch it again. If that gives the same, the publisher has replaced it: see "
            f"{data_set.page}, and unpack it by hand if you trust it.",
        )
    return f"{kind} {expected} (stated by {data_set.checksum_from}) and structure"


def _digest(path: Path, kind: str, watch: Watch) -> str:
    digest, total = hashlib.new(kind, usedforsecurity=False), path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            watch("checking", file.tell(), total)
    return digest.hexdigest()


def _incomplete(data_set: DataSet, folder: Path, why: str) -> DataError:
    return DataError(
        "The folder of a data set is not as it should be.",
        code="data-set-incomplete",
        where=str(folder),
        why=why,
        fix=f"Remove the folder and fetch it again: panorgan fetch {data_set.name}."
        if data_set.url
        else f"{data_set.how} Its page: {data_set.page}",
    )


def _origin(data_set: DataSet, source: str, checked: str, scans: int) -> str:
    return (
        f"{data_set.title}\n\n"
        f"Page:     {data_set.page}\n"
        f"Licence:  {data_set.licence}: {data_set.licence_url}\n"
        f"          {data_set.terms}\n"
        f"Cite:     {data_set.cite}\n"
        f"From:     {source}, on {time.strftime('%Y-%m-%d')}\n"
        f"Checked:  {checked}; {scans} scans\n"
    )
