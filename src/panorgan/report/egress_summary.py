"""What has left a site, from its audit log: messages by kind, names of numbers, and the site's own curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panorgan.federation.audit import AuditReport, read_log
from panorgan.workflows.run_log import RoundRecord

_DICE, _LOSS = "dice/", "loss"
_LEFT = ("sent", "failed")


@dataclass(frozen=True)
class MessageKind:
    """Messages of one task. `tensors` is the largest number in one message, `numbers` are the names of all numbers."""

    task: str
    messages: int
    bytes: int
    tensors: int
    numbers: Sequence[str]


@dataclass(frozen=True)
class EgressSummary:
    """The log in short. `refused` answers did not leave; `declined` are requests beyond the agreement, with reasons."""

    log: AuditReport
    kinds: Sequence[MessageKind]
    messages: int
    bytes: int
    refused: Sequence[str]
    declined: Sequence[str]
    models_scored: int
    runs: int
    first: str
    last: str


def summarise_egress(path: Path, stages: Mapping[str, int]) -> tuple[EgressSummary, list[RoundRecord]]:
    """The summary of a site's log, and the rounds of its newest run as far as the log knows them.

    `stages`: how many rounds of the run come before each stage.
    """
    report, entries = read_log(path)
    left = [entry for entry in entries if entry["kind"] in _LEFT]
    tasks = dict.fromkeys(str(entry.get("task", "")) for entry in left)
    refused = [entry for entry in entries if entry["kind"] == "refused"]
    scored = {(entry.get("run"), entry["sha256"]) for entry in left if entry.get("task") == "evaluate"}
    summary = EgressSummary(
        log=report,
        kinds=[_kind(task, [entry for entry in left if entry.get("task", "") == task]) for task in tasks],
        messages=len(left),
        bytes=sum(entry["bytes"] for entry in left),
        refused=_reasons(entry for entry in refused if entry.get("direction") != "in"),
        declined=_reasons(entry for entry in refused if entry.get("direction") == "in"),
        models_scored=len(scored),
        runs=len({entry.get("run") for entry in left}),
        first=_when(left[0]) if left else "",
        last=_when(left[-1]) if left else "",
    )
    newest = [entry for entry in left if entry.get("run") == left[-1].get("run")] if left else []
    return summary, _rounds(newest, stages)


def _kind(task: str, entries: Sequence[Mapping[str, Any]]) -> MessageKind:
    numbers = sorted({name for entry in entries for name in entry.get("numbers", ())})
    tensors = max((int(entry.get("tensors", 0)) for entry in entries), default=0)
    return MessageKind(task, len(entries), sum(entry["bytes"] for entry in entries), tensors, numbers)


def _rounds(entries: Sequence[Mapping[str, Any]], stages: Mapping[str, int]) -> list[RoundRecord]:
    """Rounds by number; of a repeated answer the last one counts."""
    known: dict[tuple[str, int], tuple[dict[str, float], dict[str, float]]] = {}
    for entry in entries:
        if entry["kind"] != "sent" or entry.get("task") not in ("train", "evaluate"):
            continue
        losses, dice = known.setdefault((str(entry.get("stage", "")), int(entry.get("round", 0))), ({}, {}))
        for name, value in (entry.get("numbers") or {}).items():
            if name == _LOSS:
                losses["this site"] = value
            elif name.startswith(_DICE):
                dice[name.removeprefix(_DICE)] = value
    numbered = {stages.get(stage, 0) + round_: (stage, *numbers) for (stage, round_), numbers in known.items()}
    return [
        RoundRecord(number, stage, losses, {"this site": dice} if dice else None, {}, 0, 0)
        for number, (stage, losses, dice) in sorted(numbered.items())
    ]


def _reasons(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    return [f"{_when(entry)}: {'; '.join(map(str, entry.get('reasons', ())))}" for entry in entries]


def _when(entry: Mapping[str, Any]) -> str:
    return f"{entry['time'][:16].replace('T', ' ')} UTC"
