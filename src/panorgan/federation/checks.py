"""What the coordinator accepts from a site. A bad answer is refused with its reason; the round goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from panorgan.errors import MessageError
from panorgan.federation.message import Message, MessageFile
from panorgan.federation.tasks import Task
from panorgan.methods.exchange import SiteFacts


def check_answer(file: MessageFile, task: Task, site: str, expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse an answer to another question, from somebody else, with unknown keys, wrong shapes or bad values."""
    check_envelope(file.meta, task, site)
    if expected and not file.keys:
        raise MessageError(f"Site {site} sent no weights.")
    for key in file.keys:
        _check_tensor(file, key, site, expected)


def check_envelope(meta: Mapping[str, Any], task: Task, site: str) -> None:
    """Refuse an answer to another question, of another run, or in somebody else's name."""
    wanted = {"answers": task.label, "run": task.run, "site": site}
    for name, value in wanted.items():
        if meta.get(name) != value:
            raise MessageError(
                f"Site {site} sent an answer that does not belong here.",
                why=f"its {name!r} is {meta.get(name)!r}, expected {value!r}",
            )


def read_introduction(answer: bytes, task: Task, site: str) -> SiteFacts:
    """What a site that joins tells about itself, checked."""
    message = Message.from_bytes(answer)
    check_envelope(message.meta, task, site)
    if "train_cases" not in message.numbers:
        raise MessageError(f"Site {site} does not say who it is.", why="the number 'train_cases' is missing")
    annotated = {name: int(count) for name, count in _numbers_of(message, "annotated/").items()}
    return SiteFacts(site, int(message.numbers["train_cases"]), annotated)


def read_scores(answer: bytes, task: Task, site: str) -> dict[str, float]:
    """A site's validation Dice by structure, checked."""
    message = Message.from_bytes(answer)
    check_envelope(message.meta, task, site)
    scores = _numbers_of(message, "dice/")
    for structure, value in scores.items():
        if not 0 <= value <= 1:
            raise MessageError(f"Site {site} sent a score that is no Dice.", why=f"{structure}: {value}")
    return scores


def _numbers_of(message: Message, prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in message.numbers.items() if name.startswith(prefix)}


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity."""
    # A sum in double precision is finite exactly when every addend is: one pass, no mask in memory.
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum(dtype=torch.float64)))


def _check_tensor(file: MessageFile, key: str, site: str, expected: Mapping[str, torch.Tensor]) -> None:
    if key not in expected:
        raise MessageError(f"Site {site} sent an unknown key.", why=f"{key!r} is not part of the model")
    if file.shape(key) != tuple(expected[key].shape):
        raise MessageError(
            f"Site {site} sent a tensor of the wrong shape.",
            why=f"{key!r} has {file.shape(key)}, expected {tuple(expected[key].shape)}",
        )
    tensor = file.array(key)
    if tensor.dtype != expected[key].dtype:
        raise MessageError(
            f"Site {site} sent a tensor of the wrong type.",
            why=f"{key!r} is {tensor.dtype}, expected {expected[key].dtype}",
        )
    if not is_finite(tensor):
        raise MessageError(f"Site {site} sent values that are not finite.", why=f"NaN or infinity in {key!r}")
