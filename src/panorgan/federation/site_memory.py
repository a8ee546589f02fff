"""Checks a request against the site's record of the run: its own last round, the plan, its data, scoring requests.

A request states the last round of this site that the coordinator has an answer for. A site that has lost the state of
that round, or holds an older one, must not continue silently: it reports that, and continues when the state is restored
or when the loss is accepted at the site by creating a file (`accept-lost-state`) in its folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from panorgan.errors import RunError
from panorgan.federation.agreement_checks import validations
from panorgan.federation.failures import DataChangedError, LostStateError, NotAgreedError, TooManyQuestionsError
from panorgan.federation.run_record import RunRecord, Scores, read_record
from panorgan.federation.settings import TrainingSettings
from panorgan.federation.tasks import Task
from panorgan.methods.protocol import Stage

ACCEPT = "accept-lost-state"
"""A file of this name in the site's folder: continue with the existing state, once."""
MODELS_PER_ROUND = 3
"""Models that a site scores for one round. It is one, unless the coordinator was killed in that round and continued
with other sites; the same model again is answered from the record."""
_NAMED = 5

Finished = tuple[str, int]


class SiteMemory:
    """Compares requests with the site's folder."""

    def __init__(self, site: str, folder: Path, stages: Sequence[Stage], training: TrainingSettings) -> None:
        self.site, self.folder = site, folder
        self._stages, self._training = stages, training
        self._order = [stage.name for stage in stages]

    def recall(self, task: Task, finished: Finished | None, contents: Callable[[], Mapping[str, str]]) -> RunRecord:
        """The record of the run, made at its first round. Refuses a request, or data, that does not match it.

        `finished` is the round of the saved state, `contents` reads the site's data.
        """
        record, why = self._found(task, finished)
        accepts = (self.folder / ACCEPT).exists()
        if why and not accepts:
            raise self._lost(task, finished, why)
        if record is None:
            if task.kind != "train" and not accepts:
                raise NotAgreedError(
                    f"Site {self.site} is asked to score a model of a run in which it was never asked to train.",
                    code="unknown-run",
                    fix="Nothing was computed or sent. Ask the coordinator what runs there.",
                )
            record = RunRecord(task.run, task.plan, dict(contents()))
            record.save(self.folder)
            return record
        self._check_plan(task, record)
        self._check_data(record, contents())
        return record

    def recovered(self) -> None:
        """A round is done: remove the acceptance of a loss."""
        (self.folder / ACCEPT).unlink(missing_ok=True)

    def is_past(self, task: Task, finished: Finished) -> bool:
        """Whether the requested round lies before the last one that the site finished."""
        return self._place(finished) > self._place((task.round_info.stage, task.round_info.round))

    def refuse_the_past(self, task: Task, finished: Finished) -> NoReturn:
        """A site cannot return to an earlier state."""
        raise RunError(
            f"Site {self.site} is asked for round {task.round_info.round} of {task.round_info.stage}, "
            f"but has already finished round {finished[1]} of {finished[0]}.",
            code="round-already-finished",
            where=str(self.folder),
            why="the coordinator went back to an older checkpoint",
            fix="Restore the coordinator's newest checkpoint, or start a new run.",
        )

    # -- questions -----------------------------------------------------------------------------------------

    def scores(self, task: Task, request: bytes, record: RunRecord, score: Callable[[], Scores]) -> Scores:
        """The site's scores of a model: computed once, afterwards from the record. Too many models are refused."""
        known = record.questions.setdefault(task.label, {})
        asked = hashlib.sha256(request).hexdigest()
        if asked not in known:
            if len(known) >= MODELS_PER_ROUND:
                raise self._too_many(task, record)
            known[asked] = score()
            record.save(self.folder)
        return known[asked]

    def _too_many(self, task: Task, record: RunRecord) -> TooManyQuestionsError:
        answered = sum(len(models) for models in record.questions.values())
        agreed = validations(self._training, self._stages)
        error = TooManyQuestionsError(
            f"Site {self.site} is asked to score yet another model for round {task.round_info.round} of "
            f"{task.round_info.stage}.",
            why=f"it has scored {len(record.questions[task.label])} for this round and {answered} in this run; "
            f"the agreement allows {agreed}, one for a round",
            fix="Nothing was computed or sent. Ask the coordinator why.",
        )
        error.answered, error.agreed = answered, agreed
        return error

    # -- details -------------------------------------------------------------------------------------------

    def _found(self, task: Task, finished: Finished | None) -> tuple[RunRecord | None, str]:
        """The record, and why it is incomplete (empty if it is complete)."""
        try:
            record = read_record(self.folder, task.run)
        except LostStateError as error:
            return None, f"{error.where}: {error.why}"
        answered = task.answered.get(self.site)
        if answered is None:
            return record, ""
        if answered[0] not in self._order:
            raise NotAgreedError(
                f"Site {self.site} never answered in a stage called {answered[0]!r:.50}.", code="unknown-stage"
            )
        if finished is None:
            return record, "there is no state of this run"
        if self._place(finished) < self._place(answered):
            return record, f"the newest state is that of round {finished[1]} of {finished[0]}"
        return record, "" if record is not None else "its record of the run is missing"

    def _lost(self, task: Task, finished: Finished | None, why: str) -> LostStateError:
        answered = task.answered.get(self.site)
        has = f"the coordinator has its answer to round {answered[1]} of {answered[0]}; " if answered else ""
        left = "from the beginning" if finished is None else f"from round {finished[1]}"
        return LostStateError(
            f"The state of site {self.site} is lost or outdated.",
            where=str(self.folder),
            why=f"{has}{why}",
            fix="Restore the folder from a backup. If there is none, the site can continue "
            f"{left}, which makes another model: to accept that, create an empty file {ACCEPT!r} in the folder.",
        )

    def _check_plan(self, task: Task, record: RunRecord) -> None:
        if task.plan != record.plan:
            raise NotAgreedError(
                f"Site {self.site} is asked to prepare its cases by another plan than at the beginning of this run.",
                code="plan-changed",
                why=f"it was {record.plan!r:.300}, it is {task.plan!r:.300}",
                fix="Nothing was computed or sent. A plan stays the same for a whole run: ask the coordinator.",
            )

    def _check_data(self, record: RunRecord, now: Mapping[str, str]) -> None:
        before = record.data
        if now == before:
            return
        differences = {
            "new": sorted(now.keys() - before.keys()),
            "gone": sorted(before.keys() - now.keys()),
            "changed, or in another split": sorted(c for c in now.keys() & before.keys() if now[c] != before[c]),
        }
        raise DataChangedError(
            f"The data of site {self.site} has changed since the run began.",
            where=str(self.folder),
            why="; ".join(f"{words}: {_some(cases)}" for words, cases in differences.items() if cases),
            fix="Restore the data as it was: move new cases away (or name them under 'leave_out'), and bring back "
            "the others. If the change is intended, start a new run.",
        )

    def _place(self, finished: Finished) -> tuple[int, int]:
        return self._order.index(finished[0]), finished[1]


def _some(cases: Sequence[str]) -> str:
    more = f" and {len(cases) - _NAMED} more" if len(cases) > _NAMED else ""
    return ", ".join(cases[:_NAMED]) + more
