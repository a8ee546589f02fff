"""A checksum in every file that panorgan writes and reads back, so that damage is detected before the data is used.

A disk, a cable or a copy may flip a bit; CRC-32 finds that, at some GB per second. It is not a signature: an
intentional change can include the checksum.

JSON and safetensors carry the checksum inside, as their first entry: `{"crc32": "1a2b3c4d", …`. It is that of all
bytes of the file, with zeros for its own eight digits. Other tools can still read such files. A file without a checksum
was written by an older version and is read as it is.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Piece = bytes | memoryview

_KEY = b"crc32"
_ZEROS = b"00000000"
# At the beginning of a JSON text, or of the header of a safetensors file (behind the eight bytes of its length).
_PLACE = re.compile(rb'(?s)(?:.{8})?\{\s*(?:"__metadata__":\{)?"(.{5})": ?"(.{8})"')
_LONGEST_PLACE = 80
_OPENING = b'{"__metadata__":{'
_ENTRY = b'"crc32":"' + _ZEROS + b'",'
_BLOCK = 1 << 20

DAMAGED = "its checksum does not match: the disk, or a copy, has changed it since it was written"


class DamagedError(ValueError):
    """Bytes are not those that were written."""

    def __init__(self) -> None:
        super().__init__(DAMAGED)


def checksum(pieces: Iterable[Piece]) -> str:
    """CRC-32 of all pieces in order, as eight digits."""
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return f"{value:08x}"


def file_checksum(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return checksum(_blocks(file))


def ends_in_checksum(path: Path) -> bool:
    """Whether the last eight bytes of a file are the checksum of those before them."""
    with path.open("rb") as file:
        value, held = 0, b""
        for block in _blocks(file):
            held += block
            value, held = zlib.crc32(held[: -len(_ZEROS)], value), held[-len(_ZEROS) :]
        return held == f"{value:08x}".encode()


def is_damaged(path: Path) -> bool:
    """Whether a file carries a checksum that does not match."""
    with path.open("rb") as file:
        head = file.read(_LONGEST_PLACE)
        found = _place(head)
        return found is not None and not _fits(found, (_with_zeros(head, found), *_blocks(file)))


class OncePerProcess:
    """Checks of files that are repeated only when another file has taken their place."""

    def __init__(self) -> None:
        self._passed: dict[Path, tuple[int, ...]] = {}

    def holds(self, path: Path, check: Callable[[Path], bool]) -> bool:
        """Whether a file is there and passes a check, always the same for one file."""
        try:
            facts = path.stat()
            identity = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
            if self._passed.get(path) != identity and not check(path):
                return False
        except OSError:
            return False
        self._passed[path] = identity
        return True


def refuse_damage(content: bytes) -> None:
    """The same for content in memory: raises DamagedError."""
    found = _place(content)
    if found is not None and not _fits(found, (_with_zeros(content, found),)):
        raise DamagedError


def sealed_json(content: Mapping[str, Any], **how: Any) -> str:
    """JSON text with its checksum; `how` as for `json.dumps`."""
    mark = {"crc32": _ZEROS.decode()}
    text = json.dumps({**mark, **content, **mark}, **how)  # the first entry, also where the content has one already
    return text.replace(_ZEROS.decode(), checksum((text.encode(),)), 1)


def read_json(content: bytes) -> Any:
    """The content passed to `sealed_json`; raises ValueError for damaged or invalid JSON."""
    refuse_damage(content.rstrip())  # a line of a log ends in a line break
    found = json.loads(content)
    if isinstance(found, dict):
        found.pop("crc32", None)
    return found


def sealed_tensors(pieces: Sequence[Piece]) -> list[Piece]:
    """A safetensors file in pieces, with its checksum in the header; a file without metadata stays as it is."""
    first = memoryview(pieces[0])
    end = _header_end(first)
    if end is None:
        return list(pieces)
    text = bytes(first[8 + len(_OPENING) : end])
    head, rest = _header(_OPENING + _ENTRY + text), [first[end:], *pieces[1:]]
    digits = checksum((head, *rest)).encode()
    return [head.replace(_ZEROS, digits, 1), *rest]


def unsealed_tensors(content: bytes) -> bytes:
    """The original safetensors bytes, to the last bit; bytes without a checksum stay as they are."""
    end = _header_end(memoryview(content))
    if end is None or _place(content) is None:
        return content
    text = content[8 + len(_OPENING) + len(_ENTRY) : end]
    return _header(_OPENING + text) + content[end:]


def _header_end(content: memoryview) -> int | None:
    """Where the header ends of a safetensors file that begins with metadata."""
    if bytes(content[8 : 8 + len(_OPENING)]) != _OPENING:
        return None
    end = 8 + int(struct.unpack("<Q", content[:8])[0])
    return end if end <= len(content) else None


def _header(text: bytes) -> bytes:
    """Eight bytes of length, then the text, filled up with spaces to a multiple of eight."""
    text = text.rstrip(b" ")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _place(content: bytes) -> re.Match[bytes] | None:
    """Where the checksum is, if there is one. Its name may be damaged too, so one letter may differ."""
    found = _PLACE.match(content[:_LONGEST_PLACE])
    differing = 0 if found is None else sum(a != b for a, b in zip(found[1], _KEY, strict=True))
    return found if differing <= 1 else None


def _fits(found: re.Match[bytes], pieces: Iterable[Piece]) -> bool:
    return found[1] == _KEY and found[2] == checksum(pieces).encode()


def _with_zeros(content: bytes, found: re.Match[bytes]) -> bytes:
    return content[: found.start(2)] + _ZEROS + content[found.end(2) :]


def _blocks(file: Any) -> Iterable[bytes]:
    while block := file.read(_BLOCK):
        yield block
