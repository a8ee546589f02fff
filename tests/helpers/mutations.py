"""Messages as an attacker would write them: bytes turned over, headers that lie, JSON that no reader expects.

The same seed gives the same messages, so that what was found once is found again.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Sequence

HOSTILE = (
    "[" * 40 + "]" * 40,
    '{"a":' * 40 + "1" + "}" * 40,
    "[" * 5000 + "]" * 5000,
    "[" * 20_000,
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e308",
    "1" + "0" * 400,
    "1" * 5000,
    "-1",
    "0",
    "0.5",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "true",
    "null",
    "{}",
    "[]",
    '""',
    '"\\ud800"',
    '"\\u001b[2J"',
    '"\\u0000"',
    '"__metadata__"',
    '"F33"',
    '"BOOL"',
    '"x":1,"x":2',
    "[0,9223372036854775807]",
    "[4,0]",
    "[-4,4]",
    "[0,0,9223372036854775807]",
    "",
)
LENGTHS = (0, 1, 7, 8, 1 << 16, 1 << 31, 1 << 32, 100_000_001, 1 << 62, 1 << 63, (1 << 64) - 1)
_LONG = 4000
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|[\[\]{}:,]')


class Mutator:
    """Makes one hostile message after another from sound ones."""

    def __init__(self, sound: Sequence[bytes], seed: int = 0) -> None:
        self._sound, self._random = list(sound), random.Random(seed)

    def message(self) -> bytes:
        """The next one."""
        content = self._random.choice(self._sound)
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            content = self._random.choice(_CHANGES)(self, content)
        return content

    # -- bytes ---------------------------------------------------------------------------------------------

    def flip(self, content: bytes) -> bytes:
        """One bit."""
        changed = bytearray(content or b"\0")
        changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def overwrite(self, content: bytes) -> bytes:
        """A few bytes, by anything."""
        place = self._random.randrange(len(content) + 1)
        return content[:place] + self._random.randbytes(4) + content[place + 4 :]

    def cut(self, content: bytes) -> bytes:
        """The end off."""
        return content[: self._random.randrange(len(content) + 1)]

    def repeat(self, content: bytes) -> bytes:
        """A piece twice, or not at all."""
        first, last = sorted(self._random.randrange(len(content) + 1) for _ in range(2))
        return content[:first] + content[first:last] * self._random.choice((0, 2)) + content[last:]

    def splice(self, content: bytes) -> bytes:
        """The beginning of one message, the end of another."""
        other = self._random.choice(self._sound)
        return content[: self._random.randrange(len(content) + 1)] + other[self._random.randrange(len(other)) :]

    def lie_about_length(self, content: bytes) -> bytes:
        """Another length of the header."""
        return struct.pack("<Q", self._random.choice(LENGTHS)) + content[8:]

    # -- words ---------------------------------------------------------------------------------------------

    def in_header(self, content: bytes) -> bytes:
        """One word of the header, whose length stays right."""
        text, rest = _parted(content)
        return _joined(self._reworded(text), rest)

    def in_head(self, content: bytes) -> bytes:
        """One word of numbers and meta."""
        text, rest = _parted(content)
        try:
            header = json.loads(text)
            head = self._reworded(header["__metadata__"]["panorgan"])
            header["__metadata__"]["panorgan"] = head
            return _joined(json.dumps(header, separators=(",", ":")), rest)
        except (ValueError, KeyError, TypeError, RecursionError):
            return content

    def _reworded(self, text: str) -> str:
        if len(text) > _LONG:
            return text
        words = list(_TOKEN.finditer(text))
        if self._random.random() < 0.7:  # a value for a value: what is JSON still goes further
            words = [word for word in words if word.group()[0] not in "[]{}:,"]
        if not words:
            return text
        word = self._random.choice(words)
        kind = self._random.randrange(8)
        if kind == 0:
            new = self._random.choice(words).group()
        elif kind == 1:
            new = word.group() * 2
        else:
            new = self._random.choice(HOSTILE)
        return text[: word.start()] + new + text[word.end() :]


_CHANGES = (
    Mutator.flip,
    Mutator.overwrite,
    Mutator.cut,
    Mutator.repeat,
    Mutator.splice,
    Mutator.lie_about_length,
    *(Mutator.in_header,) * 4,
    *(Mutator.in_head,) * 6,
)


def _parted(content: bytes) -> tuple[str, bytes]:
    length = struct.unpack("<Q", content[:8])[0] if len(content) >= 8 else 0
    return content[8 : 8 + length].decode(errors="replace"), content[8 + length :]


def _joined(text: str, rest: bytes) -> bytes:
    header = text.encode(errors="replace")
    return struct.pack("<Q", len(header)) + header + rest
