"""Every way in which a message is read, tried on one message: a sound result or a refusal; all else is a fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from panorgan.anatomy import Vocabulary
from panorgan.errors import MessageError
from panorgan.federation.checks import SiteFailedError, check_answer, read_introduction, read_scores
from panorgan.federation.message import Message, MessageFile
from panorgan.federation.scores import ValidationScores
from panorgan.federation.tasks import Task, answer_meta
from panorgan.methods.protocol import RoundInfo, SiteInfo

JOIN = Task("join", "run", experiment="e")
TRAIN = Task(
    "train", "run", RoundInfo("train", 1, 2), {"north": SiteInfo("north", 3, {"liver": 3})}, "e", {"crop": True}
)
SCORE = Task("evaluate", "run", RoundInfo("train", 1, 2), experiment="e")
WEIGHTS = {"a": torch.ones(2, 2), "b": torch.zeros(3), "steps": torch.tensor(7)}
INTRODUCTION = {"train_cases": 3.0, "annotated/liver": 3.0, "plan/cases": 3.0, "plan/spacing_mm/R": 1.5}
SOUND = (
    Message(scalars=INTRODUCTION, meta=answer_meta(JOIN, "north")).to_bytes(),
    Message(WEIGHTS, {"loss": 0.5, "cases": 3.0}, answer_meta(TRAIN, "north")).to_bytes(),
    Message(scalars={"dice/liver": 0.5, "volume/liver": 1.5}, meta=answer_meta(SCORE, "north")).to_bytes(),
    Message(meta={**answer_meta(TRAIN, "north"), "failed": "data"}).to_bytes(),
    Message(WEIGHTS, meta=TRAIN.to_meta()).to_bytes(),
)
VOCABULARY = Vocabulary(["liver"])


def examine(content: bytes) -> bool:
    """Read a message from memory in every way; whether anything took it. Raises what a reader must not raise."""
    outlined = _taken(lambda: Message.outline(content))
    if not _taken(lambda: _compare(Message.from_bytes(content), Message.outline(content))):
        return outlined  # all others begin with one of these two
    assert outlined
    _taken(lambda: Task.from_meta(Message.outline(content).meta))
    _taken(lambda: read_introduction(content, JOIN, "north", VOCABULARY))
    _taken(lambda: _check_scores(read_scores(content, SCORE, "north", VOCABULARY)))
    return True


def examine_file(content: bytes, path: Path) -> bool:
    """The same for what was spooled to disk."""
    path.write_bytes(content)

    def read() -> None:
        file = MessageFile(path)
        _compare(file.message(), Message.outline(content))
        check_answer(file, TRAIN, "north", WEIGHTS)

    return _taken(read)


def _taken(read: Callable[[], object]) -> bool:
    try:
        read()
    except (MessageError, SiteFailedError) as refused:
        str(refused)  # the reason is written down
        return False
    return True


def _compare(message: Message, outline: Message) -> None:
    """A sound message: finite numbers, the tensors that its header promises, and the same again once written."""
    assert all(math.isfinite(value) for value in message.scalars.values())
    assert (message.scalars, message.meta) == (outline.scalars, outline.meta)
    assert _forms(message) == _forms(outline)
    again = Message.from_bytes(message.to_bytes())
    assert (again.scalars, again.meta) == (message.scalars, message.meta)
    assert _forms(again) == _forms(message)


def _forms(message: Message) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {key: (value.shape, value.dtype) for key, value in message.tensors.items()}


def _check_scores(scores: ValidationScores) -> None:
    assert all(0 <= value <= 1 for value in scores.dice.values())
    assert all(0 <= value < math.inf for value in scores.volume.values())
