"""The coordinator's state after every round, written so that a kill at any moment loses at most the current round."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from panorgan.checksums import sealed_tensors
from panorgan.errors import MessageError, RunError
from panorgan.federation.files import flush_folder, write_atomically
from panorgan.federation.message import Message
from panorgan.federation.message_files import open_checked
from panorgan.methods.protocol import Payload

_KEPT = 2
_PLAIN = ("rounds_done", "sites", "best", "scores", "scorers", "plan", "last_round", "answered")
_KEYS = {"last_round": "told"}
"""Keys in the file, where they differ from the attributes."""


@dataclass
class CoordinatorState:
    """Everything the coordinator needs to continue.

    `rounds_done` counts over all stages. `best` names the round with the best validation score so far, `scores` holds
    each site's latest, `scorers` names the sites whose scores made `best`. `last_round` is the last round's event in
    the log. `answered` holds each site's last stage and round with a sound answer.
    """

    weights: dict[str, torch.Tensor]
    rule: Payload = field(default_factory=Payload)
    rounds_done: int = 0
    sites: dict[str, Any] = field(default_factory=dict)
    best: dict[str, float] | None = None
    scores: dict[str, float] = field(default_factory=dict)
    scorers: list[str] = field(default_factory=list)
    plan: dict[str, Any] | None = None
    last_round: dict[str, Any] | None = None
    answered: dict[str, tuple[str, int]] = field(default_factory=dict)


class Checkpoints:
    """The `checkpoints/` folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unreadable: tuple[str, ...] = ()
        """Checkpoints, newest first, that the last `load_latest` had to skip, and why."""

    def save(self, state: CoordinatorState) -> None:
        """Write `round-NNNNN.safetensors` atomically and durably, then drop the oldest."""
        tensors = {f"weights/{k}": v for k, v in state.weights.items()}
        tensors |= {f"rule/{k}": v for k, v in state.rule.tensors.items()}
        meta = {_KEYS.get(name, name): getattr(state, name) for name in _PLAIN}
        content = sealed_tensors(Message(tensors, state.rule.scalars, meta).to_pieces())
        path = self._path(state.rounds_done)
        if state.best is not None and int(state.best["round"]) == state.rounds_done:
            # The best round gets a second name for the same bytes, *before* the checkpoint that refers to it.
            best = self._best_path(state.rounds_done)
            write_atomically(best, content, durable=True)
            _link_atomically(best, path)
        else:
            best = None
            write_atomically(path, content, durable=True)
        self._tidy(best)

    def load_latest(self) -> CoordinatorState | None:
        """The newest readable checkpoint, or None if there is none at all."""
        existing = self._existing()
        self.unreadable = ()
        for path in reversed(existing):
            try:
                return _read(path)
            except MessageError as error:
                self.unreadable = (*self.unreadable, f"{path.name} ({error.why or error.what})")
        if existing:
            raise RunError(
                "None of the checkpoints can be read.",
                code="no-readable-checkpoint",
                where=str(self.folder),
                fix="The disk or the files are damaged. Restore the folder from a backup, or start a new run.",
            )
        return None

    def peek(self) -> tuple[int, tuple[str, ...]] | None:
        """Rounds done and sites in the newest checkpoint, without reading its weights."""
        for path in reversed(self._existing()):
            try:
                meta = open_checked(path).meta
                return int(meta["rounds_done"]), tuple(meta["sites"])
            except MessageError:
                continue
        return None

    def load_best(self, state: CoordinatorState) -> CoordinatorState:
        """The state after the round with the best validation score; the given one if nothing was validated."""
        if state.best is None or int(state.best["round"]) == state.rounds_done:
            return state
        path = self._best_path(int(state.best["round"]))
        try:
            return _read(path)
        except MessageError as error:
            raise RunError(
                "The checkpoint of the best round cannot be read.",
                code="best-checkpoint-unreadable",
                where=str(path),
                why=error.why,
                fix="Restore the file from a backup, or start a new run.",
            ) from error

    def _tidy(self, new_best: Path | None) -> None:
        """Remove what is no longer referred to."""
        for old in self._existing()[:-_KEPT]:
            old.unlink()
        if new_best is not None:
            for other in self.folder.glob("best-*.safetensors"):
                if other != new_best:
                    other.unlink()

    def _existing(self) -> list[Path]:
        return sorted(self.folder.glob("round-*.safetensors"))

    def _path(self, rounds_done: int) -> Path:
        return self.folder / f"round-{rounds_done:05d}.safetensors"

    def _best_path(self, rounds_done: int) -> Path:
        return self.folder / f"best-{rounds_done:05d}.safetensors"


def _link_atomically(source: Path, target: Path) -> None:
    scratch = target.with_name(f".{target.name}.incomplete")
    scratch.unlink(missing_ok=True)
    os.link(source, scratch)
    os.replace(scratch, target)
    flush_folder(target.parent)


def _read(path: Path) -> CoordinatorState:
    message = open_checked(path).message()
    weights = {k.removeprefix("weights/"): v for k, v in message.tensors.items() if k.startswith("weights/")}
    rule = {k.removeprefix("rule/"): v for k, v in message.tensors.items() if k.startswith("rule/")}
    # Checkpoints of older versions do not record `answered`: nothing is compared then.
    keys = {name: _KEYS.get(name, name) for name in _PLAIN if name in message.meta or name != "answered"}
    plain = {name: message.meta[key] for name, key in keys.items()}
    return CoordinatorState(weights, Payload(rule, message.scalars), **plain)
