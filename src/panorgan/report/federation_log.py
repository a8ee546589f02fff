"""Sites, pauses and incidents in the log of a federation: the content of the coordinator's page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from panorgan.federation.events import DAMAGED, Event
from panorgan.workflows.event_words import event_line
from panorgan.workflows.run_log import RoundRecord

_SHORTEST_PAUSE = 5.0
_SHOWN_PAUSES = 12
_REASONS = ("missing", "failed", "refused", "resumed", "late_join")
_TOLD = ("refused", "failed", "missing", "late_join", DAMAGED)


@dataclass(frozen=True)
class SitePart:
    """A site's part in the run. `used` and `missed` count rounds since it joined: with its update, or without."""

    name: str
    joined_in: int
    train_cases: int
    annotated: Mapping[str, int]
    used: int
    missed: int
    refused: int
    failed: int
    has_model: bool


@dataclass(frozen=True)
class Pause:
    """Time between two rounds in which nothing was computed, and what the log says about it."""

    before: int
    seconds: float
    why: str


@dataclass(frozen=True)
class ScoreTable:
    """Validation Dice of one round. `cells`: structure → site → Dice; `means` by structure, `overall` by site."""

    number: int
    sites: Sequence[str]
    cells: Mapping[str, Mapping[str, float]]
    means: Mapping[str, float]
    overall: Mapping[str, float]
    mean: float


@dataclass(frozen=True)
class Happening:
    """A line of the log; `code` where it has one."""

    time: float
    words: str
    code: str = ""


def site_parts(events: Sequence[Event], have_model: Iterable[str]) -> list[SitePart]:
    """Every site that has joined, by name."""
    joined: dict[str, tuple[int, Mapping[str, Any]]] = {}
    rounds: dict[int, set[str]] = {}
    for event in events:
        if event.kind == "joined":
            joined |= {name: (1, facts) for name, facts in event.facts["sites"].items() if name not in joined}
        elif event.kind == "late_join":
            joined[event.facts["site"]] = int(event.facts["number"]), event.facts
        elif event.kind == "round":
            rounds[int(event.facts["number"])] = set(event.facts["sites"])
    model = set(have_model)

    def count(kind: str, site: str) -> int:
        return sum(event.kind == kind and event.facts.get("site") == site for event in events)

    return [
        SitePart(
            name,
            first,
            int(facts.get("train_cases", 0)),
            facts.get("annotated", {}),
            used=sum(name in sites for number, sites in rounds.items() if number >= first),
            missed=sum(name not in sites for number, sites in rounds.items() if number >= first),
            refused=count("refused", name),
            failed=count("failed", name),
            has_model=name in model,
        )
        for name, (first, facts) in sorted(joined.items())
    ]


def pauses(events: Sequence[Event]) -> list[Pause]:
    """The longest ones, in the order of the run."""
    found: list[Pause] = []
    last: Event | None = None
    between: list[Event] = []
    for event in events:
        if event.kind != "round":
            between.append(event)
            continue
        if last is not None:
            began = event.time - sum((event.facts.get("seconds") or {}).values())
            if began - last.time >= _SHORTEST_PAUSE:
                why = dict.fromkeys(event_line(one) for one in between if one.kind in _REASONS)
                found.append(Pause(int(event.facts["number"]), began - last.time, "; ".join(why)))
        last, between = event, []
    longest = sorted(found, key=lambda pause: -pause.seconds)[:_SHOWN_PAUSES]
    return sorted(longest, key=lambda pause: pause.before)


def score_table(rounds: Sequence[RoundRecord], delivered: int | None) -> ScoreTable | None:
    """The validation of the delivered round; else the newest one. None where nothing was validated."""
    validated = {round_.number: round_ for round_ in rounds if any((round_.validation or {}).values())}
    if not validated:
        return None
    round_ = validated.get(delivered or 0, validated[max(validated)])
    scores = {site: own for site, own in sorted((round_.validation or {}).items()) if own}
    structures = sorted({structure for own in scores.values() for structure in own})
    by_structure = {name: {site: own[name] for site, own in scores.items() if name in own} for name in structures}
    return ScoreTable(
        round_.number,
        tuple(scores),
        by_structure,
        {structure: round_.organ_dice(structure) for structure in structures},
        {site: sum(own.values()) / len(own) for site, own in scores.items()},
        round_.mean_dice,
    )


def troubles(events: Iterable[Event]) -> list[Happening]:
    """Refused updates, drop-outs and late joins; not the end of one segment and the start of the next."""
    return [_happening(event) for event in events if event.kind in _TOLD]


def notices(events: Iterable[Event]) -> list[Happening]:
    """Notices of the method, the watchdog and the coordinator."""
    return [_happening(event) for event in events if event.kind == "notice"]


def _happening(event: Event) -> Happening:
    return Happening(event.time, event_line(event), str(event.facts.get("code", "")))
