"""Checks the answers of sites. A bad answer is refused with its reason; the round continues."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from panorgan.anatomy import Vocabulary
from panorgan.errors import MessageError
from panorgan.federation.failures import CODES, DIVERGED
from panorgan.federation.message import Message, MessageFile
from panorgan.federation.names import check_names, check_structures
from panorgan.federation.scores import ValidationScores
from panorgan.federation.tasks import Task, answer_meta
from panorgan.methods.protocol import Scalars, SiteInfo

_ROOM_PER_MESSAGE = 1 << 20
_ROOM_PER_TENSOR = 1 << 10
_BLOCK = 1 << 18


class SiteFailedError(Exception):
    """A site reports that it could not do what it was asked; `code` is one of `failures.CODES`."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def is_own_fault(error: BaseException) -> bool:
    """Whether reading an answer failed because this machine lacks disk space or memory, which is no site's fault.

    A site cannot cause it: answers are measured before they are read, and take no more memory than they have bytes.
    """
    causes = (error, error.__cause__)
    if any(isinstance(cause, OSError | MemoryError) for cause in causes):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch's message


def refusal(site: str, error: Exception) -> MessageError:
    """Why an answer is refused; an unforeseen error is named by its type."""
    if isinstance(error, MessageError):
        return error
    why = f"{type(error).__name__}: {error}"
    return MessageError(f"Site {site} sent an answer that cannot be read.", code="unreadable-answer", why=f"{why:.300}")


def check_answer(file: MessageFile, task: Task, site: str, expected: Mapping[str, torch.Tensor]) -> float:
    """Refuse an answer to another request, from another site, with unknown keys, wrong shapes or bad values.

    Returns the distance of the update from what is expected (an L2 norm over all of its floating-point tensors).
    """
    check_envelope(file.meta, task, site)
    check_names(file.scalars, site)
    if not file.keys and any(example.device.type != "meta" for example in expected.values()):
        raise MessageError(f"Site {site} sent no weights.", code="no-weights")
    return math.sqrt(sum(_check_tensor(file, key, site, expected) for key in file.keys))


def check_size(answer: bytes, site: str, expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse an answer that is larger than anything the site may send, before it is read."""
    allowed = sum(example.nelement() * example.element_size() for example in expected.values())
    # Names, shapes and numbers are added to the size of the tensors.
    allowed += _ROOM_PER_MESSAGE + _ROOM_PER_TENSOR * len(expected)
    if len(answer) > allowed:
        raise MessageError(
            f"Site {site} sent too much.",
            code="answer-too-large",
            why=f"{len(answer)} bytes, at most {allowed} are possible",
        )


def extra_norms(file: MessageFile, expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Norms of the tensors besides weights (`control/…`, `teacher/…`), by the word before the slash.

    Their values can only be compared with what other sites send.
    """
    squares: dict[str, float] = {}
    for key in file.keys:
        if expected[key].device.type == "meta" and expected[key].is_floating_point():
            group = key.partition("/")[0]
            norm = float(torch.linalg.vector_norm(file.tensor(key), dtype=torch.float64))
            squares[group] = squares.get(group, 0.0) + norm**2
    return {group: math.sqrt(total) for group, total in squares.items()}


def outliers(norms: Mapping[str, float], factor: float | None) -> dict[str, str]:
    """Sites whose update is far larger than the others' (`factor` × the median), with the reason.

    It takes three sites: of two, it cannot be decided which is wrong.
    """
    if factor is None or len(norms) < 3:
        return {}
    median = statistics.median(norms.values())
    return {
        site: f"its norm is {norm:.4g}, {norm / median:.3g} times the median of this round ({median:.4g}); "
        f"training.outlier_factor allows {factor:g}"
        for site, norm in sorted(norms.items())
        if median > 0 and norm > factor * median
    }


def check_envelope(meta: Mapping[str, Any], task: Task, site: str) -> None:
    """Refuse an answer to another request, of another run, or in another site's name."""
    wanted = answer_meta(task, site)
    for name, value in wanted.items():
        if meta.get(name) != value:
            raise MessageError(
                f"Site {site} sent an answer that does not belong here.",
                code="misaddressed",
                why=f"its {name!r} is {str(meta.get(name))!r:.100}, expected {value!r}",
            )
    if meta.get("failed") == DIVERGED:  # like an update that is not finite: asking again would give the same
        raise MessageError(
            f"Site {site} has diverged.",
            code="diverged",
            why="its loss or its own state is not finite; its next round starts from the last good one.",
            fix="If it happens again, lower the learning rate (training.optimizer.learning_rate).",
        )
    if "failed" in meta:
        raise SiteFailedError(str(meta["failed"]) if meta["failed"] in CODES else "internal")


def check_numbers(numbers: Scalars, facts: SiteInfo, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Refuse impossible numbers in an update: more cases than at first, or outside a method's ranges.

    A server rule may weight sites by these numbers, so all that it computes with are checked here.
    """
    if not 0 <= numbers.get("cases", 0) <= facts.train_cases:
        raise MessageError(
            f"Site {facts.name} reports more cases than when it joined.",
            code="more-cases-than-joined",
            why=f"{numbers['cases']:.6g} cases now, {facts.train_cases} then",
        )
    for name, value in numbers.items():
        for pattern, (low, high) in ranges.items():
            if fnmatchcase(name, pattern) and not low <= value <= high:
                raise MessageError(
                    f"Site {facts.name} sent an impossible number.",
                    code="number-out-of-range",
                    why=f"{name!r:.100} is {value:.6g}, it lies between {low:g} and {high:g}",
                )


def read_introduction(answer: bytes, task: Task, site: str, vocabulary: Vocabulary) -> tuple[SiteInfo, Scalars]:
    """The description and measurements of a site that joins, checked."""
    check_size(answer, site, {})
    message = Message.from_bytes(answer)
    check_envelope(message.meta, task, site)
    if "train_cases" not in message.scalars:
        raise MessageError(
            f"Site {site} does not introduce itself.",
            code="introduction-incomplete",
            why="the number 'train_cases' is missing",
        )
    cases, counts = message.scalars["train_cases"], _numbers_of(message, "annotated/")
    if not all(0 <= count <= cases and count == int(count) for count in (cases, *counts.values())):
        raise MessageError(
            f"Site {site} counts its cases wrongly.", code="bad-counts", why=f"{cases} cases, annotated {counts!r:.200}"
        )
    check_structures(counts, vocabulary, site, "annotates")
    measured = {name: value for name, value in message.scalars.items() if name.startswith("plan/")}
    return SiteInfo(site, int(cases), {name: int(count) for name, count in counts.items()}), measured


def read_scores(answer: bytes, task: Task, site: str, vocabulary: Vocabulary) -> ValidationScores:
    """A site's validation scores by structure, checked; `Message` ensures that they are finite."""
    check_size(answer, site, {})
    message = Message.from_bytes(answer)
    check_envelope(message.meta, task, site)
    scores = ValidationScores.from_numbers(message.scalars)
    check_structures(scores.dice, vocabulary, site, "scores")
    check_structures(scores.volume, vocabulary, site, "measures")
    for structure, value in scores.dice.items():
        if not 0 <= value <= 1:
            raise MessageError(
                f"Site {site} sent a score that is not a Dice.", code="not-a-dice", why=f"{structure}: {value}"
            )
    for structure, value in scores.volume.items():
        if value < 0:
            raise MessageError(
                f"Site {site} sent a ratio of volumes below zero.", code="negative-volume", why=f"{structure}: {value}"
            )
    return scores


def _numbers_of(message: Message, prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in message.scalars.items() if name.startswith(prefix)}


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity."""
    # A sum in double precision is finite exactly when every addend is: one pass, no mask in memory.
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum(dtype=torch.float64)))


def _check_tensor(file: MessageFile, key: str, site: str, expected: Mapping[str, torch.Tensor]) -> float:
    """Refuse a bad tensor; returns its squared distance from the example, where there is one to compare with."""
    if key not in expected:
        raise MessageError(
            f"Site {site} sent an unknown key.", code="unknown-key", why=f"{key!r} is not part of the model"
        )
    if file.shape(key) != tuple(expected[key].shape):
        raise MessageError(
            f"Site {site} sent a tensor of the wrong shape.",
            code="wrong-shape",
            why=f"{key!r} has {file.shape(key)}, expected {tuple(expected[key].shape)}",
        )
    tensor = file.tensor(key)
    if tensor.dtype != expected[key].dtype:
        raise MessageError(
            f"Site {site} sent a tensor of the wrong type.",
            code="wrong-type",
            why=f"{key!r} is {tensor.dtype}, expected {expected[key].dtype}",
        )
    if not tensor.is_floating_point():
        return 0.0
    if expected[key].device.type == "meta":
        finite, distance = is_finite(tensor), 0.0
    else:
        # One pass does both: a distance is finite exactly when every value is (sound values do not overflow).
        distance = _squared_distance(tensor, expected[key])
        finite = math.isfinite(distance)
    if not finite:
        raise MessageError(
            f"Site {site} sent values that are not finite.",
            code="not-finite",
            why=f"NaN or infinity in {key!r}: its training has diverged.",
            fix="If it happens again, lower the learning rate (training.optimizer.learning_rate).",
        )
    return distance


def _squared_distance(tensor: torch.Tensor, example: torch.Tensor) -> float:
    """Σ (a − b)², block by block: within the processor's cache it takes half the time."""
    values, others = tensor.reshape(-1), example.reshape(-1)
    total = 0.0
    for start in range(0, values.numel(), _BLOCK):
        block = slice(start, start + _BLOCK)
        difference = values[block].float() - others[block].cpu().float()
        total += float(torch.linalg.vector_norm(difference, dtype=torch.float64)) ** 2
    return total
