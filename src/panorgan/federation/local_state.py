"""A site's state on its own disk between rounds, and the answer that belongs to it.

State and answer of a round are saved together: asked again for a finished round, a site gives the same answer instead
of training twice from a later state.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from panorgan.checksums import sealed_tensors, unsealed_tensors
from panorgan.errors import MessageError, RunError
from panorgan.federation.files import write_atomically
from panorgan.federation.message import Message, MessageFile
from panorgan.federation.message_files import open_checked, refuse_damaged
from panorgan.methods.protocol import Payload


@dataclass(frozen=True)
class SavedRound:
    """The state after a finished round; `stage` and `round` name it."""

    stage: str
    round: int
    rule: Payload
    optimizer: dict[str, torch.Tensor]


_NO_STATE = "no_state"


class LocalState:
    """A site's private folder for one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._state = folder / "state.safetensors"
        self._answer = folder / "answer.safetensors"
        self._answer_before = folder / "answer-before.safetensors"
        self._checked: tuple[int, ...] | None = None

    def save(self, run: str, saved: SavedRound, answer: bytes | None) -> None:
        """Save state and answer. Renaming the state file commits both: until then, the old one is valid.

        A site without state saves no answer: it computes the same one again. The file still records the round.
        """
        tensors = {f"rule/{k}": v for k, v in saved.rule.tensors.items()}
        tensors |= {f"optimizer/{k}": v for k, v in saved.optimizer.items()}
        if answer is not None:
            self._keep_previous(Message.outline(answer).meta)
            write_atomically(self._answer, sealed_tensors([answer]), durable=True)
        meta = {"run": run, "stage": saved.stage, "round": saved.round, _NO_STATE: answer is None}
        pieces = sealed_tensors(Message(tensors, saved.rule.scalars, meta).to_pieces())
        write_atomically(self._state, pieces, durable=True)
        self._checked = self._identity()

    def _keep_previous(self, new: Mapping[str, Any]) -> None:
        """Keep the answer of the round before, unless the existing one is an unfinished attempt of this round."""
        try:
            old = MessageFile(self._answer).meta
        except MessageError:
            return
        if (old.get("run"), old.get("answers")) != (new.get("run"), new.get("answers")):
            os.replace(self._answer, self._answer_before)

    def finished(self, run: str) -> tuple[str, int] | None:
        """Stage and round of the saved state of this run, if there is one."""
        if not self._state.is_file():
            return None
        meta = self._open_state().meta
        return (str(meta["stage"]), int(meta["round"])) if meta.get("run") == run else None

    def has_state(self, run: str) -> bool:
        """Whether a state of this run is saved, and not only the name of its last round."""
        return self.finished(run) is not None and not self._open_state().meta.get(_NO_STATE, False)

    def load(self) -> SavedRound:
        """The saved state; call `finished` first."""
        message = self._open_state().message()

        def group(prefix: str) -> dict[str, torch.Tensor]:
            return {k.removeprefix(prefix): v for k, v in message.tensors.items() if k.startswith(prefix)}

        meta = message.meta
        rule = Payload(group("rule/"), message.scalars)
        return SavedRound(str(meta["stage"]), int(meta["round"]), rule, group("optimizer/"))

    def _open_state(self) -> MessageFile:
        try:
            if self._checked != (identity := self._identity()):  # once for every new file
                refuse_damaged(self._state)
                self._checked = identity
            return MessageFile(self._state)
        except MessageError as error:
            raise RunError(
                "A site's state cannot be read.",
                code="state-unreadable",
                where=str(self._state),
                why=error.why,
                fix="Restore the site's folder from a backup, or start a new run.",
            ) from error

    def _identity(self) -> tuple[int, ...]:
        facts = self._state.stat()
        return facts.st_ino, facts.st_size, facts.st_mtime_ns

    def answer_to(self, run: str, label: str) -> bytes | None:
        """The saved answer to this task: that of the last round, or of the one before.

        A coordinator whose newest checkpoint is damaged repeats a round that the site has already finished.
        """
        for path in (self._answer, self._answer_before):
            try:
                meta = open_checked(path).meta
            except MessageError:
                continue
            if meta.get("answers") == label and meta.get("run") == run:
                return unsealed_tensors(path.read_bytes())
        return None
