"""The requests of a coordinator and how they are written into a message's meta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from panorgan.errors import MessageError
from panorgan.methods.protocol import RoundInfo, SiteInfo

Kind = Literal["join", "train", "evaluate", "deliver"]


_LONGEST = 100
_BEFORE_ROUND_1 = RoundInfo("", 0, 1)


@dataclass(frozen=True)
class Task:
    """*join*: introduce yourself. *train*: one round. *evaluate*: score this model on your validation cases.
    *deliver*: this is the model, keep it.

    `run` names the run, so that messages of different runs are never confused; `experiment` is the fingerprint of the
    agreement; `plan` says how cases are prepared (None before the sites have joined); `card` describes a delivered
    model. `answered` states each site's stage and round of the last sound answer, by which a site detects that it has
    lost its state.
    """

    kind: Kind
    run: str
    round_info: RoundInfo = _BEFORE_ROUND_1
    sites: Mapping[str, SiteInfo] = field(default_factory=dict)
    experiment: str = ""
    plan: Mapping[str, Any] | None = None
    card: Mapping[str, Any] | None = None
    answered: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Names the task within its run; a repeated task has the same label."""
        return f"{self.kind}/{self.round_info.stage}/{self.round_info.round}"

    def to_meta(self) -> dict[str, Any]:
        """JSON for a message."""
        round_info = self.round_info
        return {
            "task": self.kind,
            "run": self.run,
            "stage": round_info.stage,
            "round": round_info.round,
            "rounds": round_info.rounds,
            "sites": {name: facts.as_json() for name, facts in sorted(self.sites.items())},
            "experiment": self.experiment,
            "plan": None if self.plan is None else dict(self.plan),
            "card": None if self.card is None else dict(self.card),
            "answered": {site: list(last) for site, last in sorted(self.answered.items())},
        }

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Task:
        """The inverse of `to_meta`."""
        try:
            kind = meta["task"]
            if kind not in get_args(Kind):
                raise ValueError(f"unknown task {kind!r}")
            for name in ("run", "stage", "experiment"):
                if not (isinstance(meta[name], str) and meta[name].isprintable() and len(meta[name]) <= _LONGEST):
                    raise ValueError(f"{name} is no plain name")
            round_info = RoundInfo(meta["stage"], int(meta["round"]), int(meta["rounds"]))
            sites = {name: SiteInfo.from_json(name, facts) for name, facts in meta["sites"].items()}
            plan, card = meta["plan"], meta["card"]
            if not all(part is None or isinstance(part, dict) for part in (plan, card)):
                raise TypeError("plan or card is no mapping")
            last = {site: (str(stage), int(round_)) for site, (stage, round_) in meta.get("answered", {}).items()}
            return cls(kind, meta["run"], round_info, sites, meta["experiment"], plan, card, last)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MessageError(
                "A message does not state its task.",
                code="not-a-request",
                why=f"{type(error).__name__}: {error}",
                fix="Install the same panorgan version everywhere.",
            ) from error


def answer_meta(task: Task, site: str) -> dict[str, Any]:
    """Meta of a site's answer: which request it answers, and the sender."""
    return {"answers": task.label, "run": task.run, "site": site, "experiment": task.experiment}


def failure_meta(task: Task, site: str, code: str) -> dict[str, Any]:
    """Meta of an answer that reports a failure. Only a code travels (see `failures`)."""
    return {**answer_meta(task, site), "failed": code}
