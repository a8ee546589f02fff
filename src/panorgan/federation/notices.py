"""What people should know about a run: each sentence once in its log, whoever says it and however often it resumes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from panorgan.federation.events import Event, EventLog
from panorgan.federation.remedies import Remedies
from panorgan.federation.watchdog import Watchdog
from panorgan.methods.base import Method
from panorgan.methods.protocol import Notice, RoundInfo

CHECKPOINT_DAMAGED = "checkpoint-damaged"
DELIVERED_EARLY = "delivered-early"


class NoticeBoard:
    """Writes notices into the log of events, and asks the watchdog about every validation."""

    def __init__(self, events: EventLog, remedies: Remedies | None = None) -> None:
        self._events = events
        self._noted: set[str] = set()
        self._watchdog = Watchdog(remedies)

    def recall(self, happened: Iterable[Event]) -> None:
        """Take up a run from its log: what was said already, and what validations showed."""
        rounds: dict[int, Mapping[str, Any]] = {}  # one that a kill made happen twice counts as it went the last time
        for event in happened:
            if event.kind == "notice":
                self._noted.add(event.facts["text"])
            elif event.kind == "round":
                rounds[event.facts["number"]] = event.facts
        for number in sorted(rounds):
            self.look_after_organs(rounds[number])

    def note(self, number: int, notice: Notice) -> None:
        """Write a notice down unless the log has it; `number` is the round."""
        if notice.text not in self._noted:
            self.repeat(number, notice)

    def repeat(self, number: int, notice: Notice) -> None:
        """Write a notice down, whether or not the log has it."""
        self._noted.add(notice.text)
        self._events.record("notice", number=number, code=notice.code, text=notice.text)

    def look_after_organs(self, told: Mapping[str, Any]) -> None:
        """Name organs that a round's validation shows in trouble; logs of older versions know no volumes."""
        if told["validation"]:
            progress = told["round"] / told["rounds"]
            for notice in self._watchdog.look(progress, told["validation"], told.get("volume") or {}):
                self.note(told["number"], notice)


def went_back(rounds_done: int, unreadable: Iterable[str]) -> Notice:
    """The newest checkpoint is damaged; the run goes on from the one before."""
    text = f"Going back to the checkpoint of round {rounds_done}: {', '.join(unreadable)}."
    return Notice(CHECKPOINT_DAMAGED, text)


def delivered_early(
    method: Method, schedule: Sequence[RoundInfo], delivered: int, validate_every: int
) -> Notice | None:
    """A model from before some of the method's modules began; None if it is not.

    `schedule` lists all rounds of the run, in which `delivered` counts; modules begin in the last stage.
    """
    total, rounds = len(schedule), schedule[-1].rounds
    begins = {module: total - rounds + first for module, first in method.module_starts(rounds).items()}
    missed = sorted((first, module) for module, first in begins.items() if first > delivered)
    if not missed:
        return None
    modules = ", ".join(f"{module} (round {first})" for first, module in missed)
    seldom = f"Validate more often (training.validate_every is {validate_every}), or d" if validate_every > 1 else "D"
    text = (
        f"The delivered model is that of round {delivered} of {total}, the best validated one; it was made before "
        f"these modules of the method began: {modules}. {seldom}eliver the last round (training.select: last)."
    )
    return Notice(DELIVERED_EARLY, text)
