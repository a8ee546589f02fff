"""The pace of a run and the time left, from the times in its log."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from panorgan.federation.events import Event

_LAST_ROUNDS = 9


@dataclass(frozen=True)
class Pace:
    """Seconds per round, and of the pause until the next job has started; None if not known yet."""

    round: float | None
    pause: float = 0.0

    @classmethod
    def of(cls, events: Sequence[Event]) -> Pace:
        """Medians of the last rounds, from one round's end to the next one's; pauses are counted separately."""
        rounds: list[float] = []
        pauses: list[float] = []
        before: Event | None = None
        began = False  # whether a job has begun since the last round
        for event in events:
            if event.kind in ("started", "resumed"):
                began = True
            if event.kind != "round":
                continue
            working = sum((event.facts.get("seconds") or {}).values())
            passed = event.time - before.time if before else working
            rounds.append(working if began else max(passed, 0.0))
            if began and before:
                pauses.append(max(passed - working, 0.0))
            before, began = event, False
        recent = statistics.median(rounds[-_LAST_ROUNDS:]) if rounds else None
        return cls(recent, statistics.median(pauses[-_LAST_ROUNDS:]) if pauses else 0.0)

    def left(self, rounds: int, per_job: int) -> float | None:
        """Seconds for this many rounds."""
        return None if self.round is None else rounds * self.round + (max(rounds - 1, 0) // per_job) * self.pause


def time_left(pace: Pace, rounds: int, per_job: int, last: float | None) -> float | None:
    """Seconds until the last round ends. `last`: seconds since a round ended, if something is running."""
    left = pace.left(max(rounds, 0), per_job)
    if not left or last is None or pace.round is None:
        return left
    return left - min(max(last, 0.0), pace.round)
