"""Unpack an archive into a folder that appears when it is whole. An archive from elsewhere may not write outside it."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from panorgan.errors import DataError

_Entry = tuple[str, Callable[[], IO[bytes] | None]]


def unpack(archive: Path, folder: Path, on_file: Callable[[int], None] = lambda done: None) -> None:
    """Unpack a .tar, .tar.gz or .zip. A single folder at its top is left out: `folder` is that folder."""
    scratch = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    try:
        for done, (name, opened) in enumerate(_files(archive), start=1):
            content = opened()
            if content is None:
                continue
            target = scratch / _inside(name, archive)
            target.parent.mkdir(parents=True, exist_ok=True)
            with content, target.open("wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
            on_file(done)
        inner = list(scratch.iterdir()) if scratch.is_dir() else []
        if not inner:
            raise _unusable(archive, "it holds no files")
        (inner[0] if len(inner) == 1 and inner[0].is_dir() else scratch).rename(folder)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise _unusable(archive, str(error)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _files(archive: Path) -> Iterator[_Entry]:
    """Name and content of every ordinary file; links are refused, folders and Finder's leftovers left out."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                if not info.is_dir() and not _is_leftover(info.filename):
                    yield info.filename, lambda info=info: packed.open(info)  # type: ignore[misc]
        return
    with tarfile.open(archive) as tape:
        for member in tape:
            if member.isdir() or _is_leftover(member.name):
                continue
            if not member.isfile():
                raise _unusable(archive, f"{member.name} is a link or a device, not a file")
            yield member.name, lambda member=member: tape.extractfile(member)  # type: ignore[misc]


def _inside(name: str, archive: Path) -> Path:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
        raise _unusable(archive, f"{name} would be written outside the folder")
    return Path(*path.parts)


def _is_leftover(name: str) -> bool:
    path = PurePosixPath(name)
    return path.name.startswith("._") or path.name == ".DS_Store" or "__MACOSX" in path.parts


def _unusable(archive: Path, why: str) -> DataError:
    return DataError(
        "An archive cannot be unpacked.",
        code="bad-archive",
        where=str(archive),
        why=why,
        fix="Remove it and fetch it again; an archive of another origin may be another file.",
    )
