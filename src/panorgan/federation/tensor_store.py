"""Tensors written once and read often, on disk: teachers at a site, and at the coordinator."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import torch

from panorgan.checksums import sealed_tensors
from panorgan.errors import MessageError, RunError
from panorgan.federation.files import write_atomically
from panorgan.federation.message import Message, MessageFile
from panorgan.federation.message_files import open_checked
from panorgan.methods.protocol import Tensors

_LONGEST_NAME = 60


class DiskTensorStore:
    """A folder of tensors by name, one file each; created on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, tensors: Tensors) -> None:
        """Store tensors under a name: after a kill either the old ones, or all of the new ones."""
        pieces = sealed_tensors(Message(tensors, meta={"name": name}).to_pieces())
        write_atomically(self._path(name), pieces, durable=True)

    def get(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors stored under a name."""
        return dict(_open(self._path(name), name).message().tensors)

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(str(_open(path, path.stem).meta["name"]) for path in self.folder.glob("*.safetensors")))

    def _path(self, name: str) -> Path:
        return self.folder / f"{safe_name(name)}.safetensors"


def _open(path: Path, name: str) -> MessageFile:
    try:
        return open_checked(path)
    except MessageError as error:
        raise RunError(
            f"Stored tensors are missing or unreadable: {name}.",
            code="vault-unreadable",
            where=str(path),
            why=error.why,
            fix="Restore the folder from a backup, or start a new run.",
        ) from error


class RunTensorStores:
    """The tensor stores in a site's folder, one per run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "vault"

    def of(self, run: str) -> DiskTensorStore:
        """The store of a run."""
        return DiskTensorStore(self.folder / safe_name(run))

    def remove(self, but: str | None = None) -> None:
        """Remove all stores except that of one run: teachers take N times the disk of a model, and are not needed once
        their run is over."""
        kept = None if but is None else safe_name(but)
        for path in self.folder.glob("*"):
            if path.name != kept:
                shutil.rmtree(path, ignore_errors=True)


def safe_name(name: str) -> str:
    """A file name for any text. The hash separates names that differ in capitals or odd characters only."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:_LONGEST_NAME].strip("-")
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
