"""Notices about a run: each sentence once in its log, whatever its source and however often the run resumes."""

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
    """Writes notices into the event log, and passes every validation to the watchdog."""

    def __init__(self, events: EventLog, remedies: Remedies | None = None) -> None:
        self._events = events
        self._noted: set[str] = set()
        self._watchdog = Watchdog(remedies)

    def recall(self, happened: Iterable[Event]) -> None:
        """Restore from a run's log: earlier notices and validations."""
        rounds: dict[int, Mapping[str, Any]] = {}  # of a round repeated after a kill, the last one counts
        for event in happened:
            if event.kind == "notice":
                self._noted.add(event.facts["text"])
            elif event.kind == "round":
                rounds[event.facts["number"]] = event.facts
        for number in sorted(rounds):
            self.check_organs(rounds[number])

    def note(self, number: int, notice: Notice) -> None:
        """Write a notice unless the log has it; `number` is the round."""
        if notice.text not in self._noted:
            self.repeat(number, notice)

    def repeat(self, number: int, notice: Notice) -> None:
        """Write a notice even if the log has it."""
        self._noted.add(notice.text)
        self._events.record("notice", number=number, code=notice.code, text=notice.text)

    def check_organs(self, event: Mapping[str, Any]) -> None:
        """Report organs that a round's validation shows in trouble; logs of older versions have no volumes."""
        if event["validation"]:
            progress = event["round"] / event["rounds"]
            for notice in self._watchdog.look(progress, event["validation"], event.get("volume") or {}):
                self.note(event["number"], notice)


def fallback_notice(rounds_done: int, unreadable: Iterable[str]) -> Notice:
    """The newest checkpoint is damaged; the run continues from the one before."""
    text = f"Going back to the checkpoint of round {rounds_done}: {', '.join(unreadable)}."
    return Notice(CHECKPOINT_DAMAGED, text)


def early_delivery_notice(
    method: Method, schedule: Sequence[RoundInfo], delivered: int, validate_every: int
) -> Notice | None:
    """A model from before some of the method's modules began; None if it is not.

    `schedule` lists all rounds of the run, counted by `delivered`; modules begin in the last stage.
    """
    total, rounds = len(schedule), schedule[-1].rounds
    begins = {module: total - rounds + first for module, first in method.module_starts(rounds).items()}
    missed = sorted((first, module) for module, first in begins.items() if first > delivered)
    if not missed:
        return None
    modules = ", ".join(f"{module} (round {first})" for first, module in missed)
    seldom = f"Validate more often (training.validate_every is {validate_every}), or d" if validate_every > 1 else "D"
    text = (
        f"The delivered model is that of round {delivered} of {total}, the best validated one, from before "
        f"these modules of the method began: {modules}. {seldom}eliver the last round (training.select: last)."
    )
    return Notice(DELIVERED_EARLY, text)
