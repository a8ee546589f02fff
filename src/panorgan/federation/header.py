"""The header of a message, validated before use: eight bytes of length, then JSON that describes every byte.

The sender controls these bytes. Everything about them is checked before anything else reads them: length and depth,
no key twice, finite numbers, and that every byte after the header belongs to exactly one tensor.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

METADATA = "__metadata__"
WIDTHS = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Types of tensors in messages, and bytes per element."""

_LONGEST_HEADER = 100_000_000  # bytes; the safetensors library reads no longer ones
_DEEPEST = 32  # nested mappings and lists; ours have four
_LARGEST_TENSOR = 1 << 48  # elements, where an axis of length zero counts as one: torch multiplies them
_ENTRY = {"dtype", "shape", "data_offsets"}
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies behind the header, and as what."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The content of a valid header."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def read_header(stream: BinaryIO, size: int) -> Header:
    """The header of a message of `size` bytes; raises `ValueError` with what is wrong."""
    start = stream.read(8)
    if len(start) < 8:
        raise ValueError("it ends before its header")
    (length,) = struct.unpack("<Q", start)
    if length > min(size - 8, _LONGEST_HEADER):
        raise ValueError(f"its header claims {length} bytes, the message has {size}")
    entries = read_json(stream.read(length))
    if not isinstance(entries, dict):
        raise ValueError("its header is no mapping")
    metadata = entries.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata are not texts")
    tensors = {check_name(key): _entry(key, facts) for key, facts in entries.items()}
    _refuse_gaps(tensors.values(), size - 8 - length)
    return Header(tensors, metadata)


def read_json(text: bytes | str) -> Any:
    """Untrusted JSON; `ValueError` if it is too deep, repeats a key, or holds NaN or infinity."""
    if isinstance(text, bytes):
        text = text.decode()  # other encodings are valid JSON too, but never ours
    try:
        content = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _refuse_depth(content)
    return content


def check_name(name: object) -> str:
    """A name of a tensor, a number or a fact; `ValueError` if it could disturb a log or a terminal."""
    if not isinstance(name, str) or _UNFIT.search(name):
        raise ValueError(f"{name!r:.60} is not a name: it has characters that cannot be shown")
    return name


_TOO_DEEP = f"it has more than {_DEEPEST} levels of lists and mappings"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key is repeated")
    return content


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.20} is too large")
    return value


def _refuse_depth(content: Any) -> None:
    """Level by level: a recursive function would hit the very limit that this checks."""
    level = [content]
    for _ in range(_DEEPEST + 1):
        level = [inner for outer in level for inner in _within(outer)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _within(content: Any) -> Iterable[Any]:
    if isinstance(content, dict):
        return content.values()
    return content if isinstance(content, list) else ()


def _entry(key: str, facts: Any) -> TensorEntry:
    if not isinstance(facts, dict) or facts.keys() != _ENTRY:
        raise ValueError(f"tensor {key!r:.60} is not described by {', '.join(sorted(_ENTRY))}")
    kind, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(kind, str) or kind not in WIDTHS:
        raise ValueError(f"tensor {key!r:.60} has the type {kind!r:.20}")
    if not (_is_counts(shape) and _is_counts(offsets)) or len(offsets) != 2:
        raise ValueError(f"tensor {key!r:.60} has no sound shape and place")
    if math.prod(max(length, 1) for length in shape) > _LARGEST_TENSOR:
        raise ValueError(f"tensor {key!r:.60} is too large")
    begin, end = offsets
    if end - begin != math.prod(shape) * WIDTHS[kind]:
        raise ValueError(f"tensor {key!r:.60} does not have the bytes that its shape needs")
    return TensorEntry(kind, tuple(shape), begin, end)


def _is_counts(content: Any) -> bool:
    """A short list of whole numbers from zero on. Python counts True and False as whole numbers; this does not."""
    return isinstance(content, list) and len(content) <= 64 and all(type(n) is int and n >= 0 for n in content)


def _refuse_gaps(tensors: Iterable[TensorEntry], size: int) -> None:
    """Every byte behind the header belongs to one tensor: nothing is shared, and nothing is hidden."""
    reached = 0
    for entry in sorted(tensors, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != reached:
            raise ValueError("its tensors overlap, or leave bytes between them")
        reached = entry.end
    if reached != size:
        raise ValueError(f"its tensors have {reached} bytes, {size} came")
