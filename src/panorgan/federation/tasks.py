"""The questions a coordinator asks and how they are written into a message's meta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from panorgan.errors import MessageError
from panorgan.methods.exchange import Moment, SiteFacts

Kind = Literal["join", "train", "evaluate"]


_BEFORE_ROUND_1 = Moment("", 0, 1)


@dataclass(frozen=True)
class Task:
    """*join*: tell who you are. *train*: one round. *evaluate*: score this model on your validation cases.

    `run` names the run, so that a message of another run is never mistaken for one of this.
    """

    kind: Kind
    run: str
    moment: Moment = _BEFORE_ROUND_1
    sites: Mapping[str, SiteFacts] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Names the task within its run; the same task asked again has the same label."""
        return f"{self.kind}/{self.moment.stage}/{self.moment.round}"

    def to_meta(self) -> dict[str, Any]:
        """JSON for a message."""
        moment = self.moment
        return {
            "task": self.kind,
            "run": self.run,
            "stage": moment.stage,
            "round": moment.round,
            "rounds": moment.rounds,
            "sites": {name: facts.as_json() for name, facts in sorted(self.sites.items())},
        }

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Task:
        """The inverse of `to_meta`."""
        try:
            kind = meta["task"]
            if kind not in ("join", "train", "evaluate"):
                raise ValueError(f"unknown task {kind!r}")
            moment = Moment(str(meta["stage"]), int(meta["round"]), int(meta["rounds"]))
            sites = {name: SiteFacts.from_json(name, facts) for name, facts in meta["sites"].items()}
            return cls(kind, str(meta["run"]), moment, sites)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MessageError(
                "A message does not say what it wants.",
                why=f"{type(error).__name__}: {error}",
                fix="Install the same panorgan version everywhere.",
            ) from error


def answer_meta(task: Task, site: str) -> dict[str, Any]:
    """Meta of a site's answer: which question it answers, and who speaks."""
    return {"answers": task.label, "run": task.run, "site": site}
