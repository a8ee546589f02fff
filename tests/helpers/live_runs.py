"""Logs of runs as their processes write them, for pages that follow a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from panorgan.federation.events import EventLog

JOINED = {
    "north": {"train_cases": 3, "annotated": {"liver": 3}},
    "south": {"train_cases": 2, "annotated": {"spleen": 2, "kidney_left": 2}},
}
SCORES = {"north": {"liver": 0.9}, "south": {"spleen": 0.5, "kidney_left": 0.7}}


def log_of(folder: Path) -> EventLog:
    """The log of a run folder, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    return EventLog(folder / "events.jsonl")


def begin(log: EventLog) -> None:
    log.record("started", run="r", job="job-1")
    log.record("joined", sites=JOINED, plan={"spacing": 1})


def write_round(log: EventLog, number: int, total: int = 3, **facts: Any) -> None:
    content = {
        "number": number, "stage": "train", "round": number, "rounds": total, "total": total,
        "sites": {"north": {"loss": 1 / number, "cases": 3.0}, "south": {"loss": 2 / number, "cases": 2.0}},
        "validation": None, "best": None, "bytes_sent": 100, "bytes_received": 60,
        "seconds": {"sites": 9.0, "aggregate": 1.0, "validate": 0.0, "checkpoint": 0.0},
    }  # fmt: skip
    log.record("round", **{**content, **facts})
