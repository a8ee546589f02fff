"""What crosses the wire: tensors, numbers and metadata. safetensors + JSON, never pickle.

The same bytes travel in a simulation and between hospitals.
"""

from __future__ import annotations

import io
import json
import math
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors

from panorgan.errors import MessageError
from panorgan.federation.header import METADATA, Header, check_name, read_header, read_json

VERSION = 1
_HEADER = "panorgan"
_HEAD = ("version", "numbers", "meta")
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES_BY_NAME = {name: kind for kind, name in _TYPES.items()}
_LARGEST_NUMBER = int(sys.float_info.max)


@dataclass(frozen=True)
class Message:
    """Versioned {tensors, scalars, meta}.

    Parameters
    ----------
    tensors : by key.
    scalars : finite floats by name; the format calls them `numbers`.
    meta : JSON: task, run, stage, round, sender…
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Serialise; equal messages give equal bytes.

        The format is that of safetensors, which can read it. It is written here because the library takes twice as
        long, and because only a canonical form can be compared by its header (see `is_all_of`).
        """
        return b"".join(self.to_pieces())

    def to_pieces(self) -> list[bytes | memoryview]:
        """The same in pieces: a file can be written without another copy in memory."""
        for name, value in self.scalars.items():
            if not math.isfinite(value):
                raise MessageError(
                    f"A number to be sent is not finite: {name} = {value}.",
                    code="not-finite",
                    fix="Leave it out instead.",
                )
        tensors = (self.tensors[key].detach().contiguous().cpu() for key in self._order())
        return [self._header(), *(_raw(tensor) for tensor in tensors)]

    @classmethod
    def from_bytes(cls, content: bytes) -> Message:
        """Parse and check the version; the tensors are copies."""
        numbers, meta = _read_head(_header_of(content), "")
        try:
            tensors = load_tensors(content)
        except (SafetensorError, ValueError, TypeError, RuntimeError) as error:
            raise _damaged(f"{type(error).__name__}: {error}", "") from error
        return cls(tensors, numbers, meta)

    @classmethod
    def outline(cls, content: bytes) -> Message:
        """Parse without reading values: numbers, meta, and tensors on the meta device."""
        header = _header_of(content)
        tensors = {
            key: torch.empty(entry.shape, dtype=_TYPES_BY_NAME[entry.dtype], device="meta")
            for key, entry in header.tensors.items()
        }
        return cls(tensors, *_read_head(header, ""))

    def is_all_of(self, content: bytes) -> bool:
        """Whether the bytes hold this message and nothing else, as far as can be checked without its values.

        A header has a single form, which says which byte belongs to which tensor. So if the header is the one that
        `to_bytes` writes, and the rest has the right length, nothing is hidden anywhere.
        """
        header = self._header()
        return content.startswith(header) and len(content) == len(header) + sum(map(_size, self.tensors.values()))

    def _order(self) -> list[str]:
        """Keys in the order of writing: the widest types first, so that every tensor is aligned to its width."""
        return sorted(self.tensors, key=lambda key: (-self.tensors[key].element_size(), key))

    def _header(self) -> bytes:
        """Eight bytes of length, then JSON, padded with spaces to a multiple of eight."""
        head = {"version": VERSION, "numbers": dict(sorted(self.scalars.items())), "meta": dict(self.meta)}
        self._refuse_unreadable_names()
        entries: dict[str, Any] = {METADATA: {_HEADER: json.dumps(head, sort_keys=True)}}
        offset = 0
        for key in self._order():
            tensor = self.tensors[key]
            if tensor.dtype not in _TYPES or key == METADATA:
                raise MessageError(
                    f"The tensor {key!r} cannot be sent.", code="unsendable-tensor", why=f"its type is {tensor.dtype}"
                )
            end = offset + _size(tensor)
            entries[key] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def _refuse_unreadable_names(self) -> None:
        """What is written must be readable again: names that the reader refuses are refused here."""
        try:
            for name in (*self.tensors, *self.scalars, *self.meta):
                check_name(name)
        except ValueError as error:
            raise MessageError(
                "A name cannot be sent.", code="unsendable-name", why=str(error), fix="Rename it."
            ) from error


class MessageFile:
    """A message on disk whose tensors are memory-mapped and read one by one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                header = read_header(file, path.stat().st_size)
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError, ValueError) as error:
            raise _damaged(str(error), str(path)) from error
        numbers, meta = _read_head(header, str(path))
        self.scalars: Mapping[str, float] = numbers
        self.meta: Mapping[str, Any] = meta
        self.keys: tuple[str, ...] = tuple(self._file.keys())

    def tensor(self, key: str) -> torch.Tensor:
        """One tensor."""
        tensor: torch.Tensor = self._file.get_tensor(key)
        return tensor

    def shape(self, key: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return tuple(self._file.get_slice(key).get_shape())

    def message(self) -> Message:
        """Everything at once."""
        return Message({key: self.tensor(key) for key in self.keys}, self.scalars, self.meta)


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


def _raw(tensor: torch.Tensor) -> bytes | memoryview:
    """A tensor's own memory, as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""


def _header_of(content: bytes) -> Header:
    try:
        return read_header(io.BytesIO(content), len(content))
    except ValueError as error:
        raise _damaged(str(error), "") from error


def _read_head(header: Header, where: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Numbers and meta, which travel as JSON within the header's JSON."""
    if _HEADER not in header.metadata:
        raise _damaged("it is not marked as a panorgan message", where)
    try:
        head = read_json(header.metadata[_HEADER])
        version, numbers, meta = (head.get(part) if isinstance(head, dict) else None for part in _HEAD)
        if not isinstance(numbers, dict) or not isinstance(meta, dict):
            raise ValueError("numbers or meta are not mappings")
        for name in (*numbers, *meta):
            check_name(name)
        if odd := [name for name, value in numbers.items() if not _is_number(value)]:
            raise ValueError(f"{odd[0]!r:.60} is not a plain number")
    except ValueError as error:
        raise _damaged(str(error), where) from error
    if type(version) is not int or version != VERSION:
        raise MessageError(
            f"A message has version {version!s:.40}; this panorgan uses version {VERSION}.",
            code="message-version",
            where=where,
            fix="Install the same panorgan version everywhere.",
        )
    return numbers, meta


def _is_number(value: object) -> bool:
    """Whether a float can hold it; Python counts True and False as numbers, this does not."""
    return type(value) is float or (type(value) is int and abs(value) <= _LARGEST_NUMBER)


def _damaged(why: str, where: str) -> MessageError:
    return MessageError(
        "The received bytes are not a message.",
        code="not-a-message",
        where=where,
        why=why,
        fix="The sender must send them again.",
    )
