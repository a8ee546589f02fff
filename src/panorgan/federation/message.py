"""What crosses the wire: tensors, numbers and a few words about them. safetensors + JSON, never pickle.

The same bytes travel in a simulation and between hospitals.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from panorgan.errors import MessageError

VERSION = 1
_HEADER = "panorgan"


@dataclass(frozen=True)
class Message:
    """Versioned {arrays, numbers, meta}.

    Parameters
    ----------
    arrays : tensors by key.
    numbers : finite floats by name.
    meta : JSON: task, run, stage, round, sender…
    """

    arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Serialise; equal messages give equal bytes."""
        for name, value in self.numbers.items():
            if not math.isfinite(value):
                raise MessageError(f"A number to be sent is not finite: {name} = {value}.", fix="Leave it out instead.")
        head = {"version": VERSION, "numbers": dict(sorted(self.numbers.items())), "meta": dict(self.meta)}
        arrays: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for key, tensor in sorted(self.arrays.items()):
            plain = tensor.detach().contiguous().cpu()
            # Tensors that share memory are refused by safetensors; here they travel as what they show.
            arrays[key] = plain.clone() if (place := plain.untyped_storage().data_ptr()) in seen else plain
            seen.add(place)
        return save_tensors(arrays, metadata={_HEADER: json.dumps(head, sort_keys=True)})

    @classmethod
    def from_bytes(cls, content: bytes) -> Message:
        """Parse and check the version; the tensors are the reader's own."""
        head = _read_head(_metadata_of(content), "")
        try:
            arrays = load_tensors(content)
        except (SafetensorError, ValueError) as error:
            raise _damaged(str(error), "") from error
        return cls(arrays, head["numbers"], head["meta"])


class MessageFile:
    """A message on disk whose tensors are memory-mapped and read one by one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
            metadata = self._file.metadata()
        except (SafetensorError, OSError, ValueError) as error:
            raise _damaged(str(error), str(path)) from error
        head = _read_head(metadata, str(path))
        self.numbers: Mapping[str, float] = head["numbers"]
        self.meta: Mapping[str, Any] = head["meta"]
        self.keys: tuple[str, ...] = tuple(self._file.keys())

    def array(self, key: str) -> torch.Tensor:
        """One tensor."""
        tensor: torch.Tensor = self._file.get_tensor(key)
        return tensor

    def shape(self, key: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return tuple(self._file.get_slice(key).get_shape())

    def message(self) -> Message:
        """Everything at once."""
        return Message({key: self.array(key) for key in self.keys}, self.numbers, self.meta)


def _metadata_of(content: bytes) -> Mapping[str, str] | None:
    """The metadata in a safetensors header: eight bytes of length, then JSON."""
    try:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        metadata: Mapping[str, str] | None = header.get("__metadata__")
        return metadata
    except (struct.error, ValueError, AttributeError, MemoryError) as error:
        raise _damaged(str(error), "") from error


def _read_head(metadata: Mapping[str, str] | None, where: str) -> dict[str, Any]:
    if not metadata or _HEADER not in metadata:
        raise _damaged("it does not say that it is a panorgan message", where)
    try:
        head: dict[str, Any] = json.loads(metadata[_HEADER])
        version, numbers, meta = head["version"], head["numbers"], head["meta"]
        if not isinstance(meta, dict) or not all(math.isfinite(v) for v in numbers.values()):
            raise ValueError("numbers or meta are malformed")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _damaged(str(error), where) from error
    if version != VERSION:
        raise MessageError(
            f"A message has version {version}; this panorgan speaks version {VERSION}.",
            where=where,
            fix="Install the same panorgan version everywhere.",
        )
    return head


def _damaged(why: str, where: str) -> MessageError:
    return MessageError(
        "Bytes arrived that are not a message.", where=where, why=why, fix="The sender must send them again."
    )
