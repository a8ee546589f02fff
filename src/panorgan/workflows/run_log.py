"""What the log and the manifest of a run say: the sites, their data, and every round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from panorgan.anatomy import Vocabulary
from panorgan.evaluation.forgetting import covered_organs
from panorgan.federation.events import Event
from panorgan.workflows.tables import Row, Table

# Events of an ordinary run. Any other is worth a line on the page.
_ORDINARY = {"started", "split", "joined", "round", "finished"}


@dataclass(frozen=True)
class SiteRecord:
    """One site: what it annotated and how many cases it had.

    `labelled` holds the organs of the vocabulary that its annotations cover, and the structures as it named them.
    `labelled_cases` counts training cases per such name, as far as recorded. `joined_in` is the first round it took
    part in.
    """

    name: str
    external: bool
    labelled: frozenset[str]
    labelled_cases: Mapping[str, int]
    cases: Mapping[str, int]
    joined_in: int = 1


@dataclass(frozen=True)
class RoundRecord:
    """One round of training. `validation` is site → structure → Dice, None where nothing was validated."""

    number: int
    stage: str
    losses: Mapping[str, float]
    validation: Mapping[str, Mapping[str, float]] | None
    seconds: Mapping[str, float]
    bytes_sent: int
    bytes_received: int

    @property
    def mean_dice(self) -> float:
        """Mean over sites of each site's mean, which is what selects the best round."""
        return _mean([_mean(list(d.values())) for d in (self.validation or {}).values() if d])

    def organ_dice(self, organ: str) -> float:
        """Mean over the sites that validate this organ; NaN where none does."""
        return _mean([d[organ] for d in (self.validation or {}).values() if organ in d])


def read_sites(manifest: Mapping[str, Any], vocabulary: Vocabulary, events: Iterable[Event]) -> tuple[SiteRecord, ...]:
    """Those that trained, then external ones, by name."""
    joined: dict[str, Any] = {}
    first_rounds: dict[str, int] = {}
    for event in events:
        if event.kind == "joined":
            joined |= event.facts["sites"]
        elif event.kind == "late_join":
            joined[event.facts["site"]] = event.facts
            first_rounds[event.facts["site"]] = int(event.facts["number"])
    sites = []
    for name, facts in manifest["sites"].items():
        given = {structure: covered_organs([structure], vocabulary) for structure in facts["annotated"]}
        counts = joined.get(name, {}).get("annotated", {})
        cases = {n: counts[s] for s, names in given.items() if s in counts for n in names}
        labelled = covered_organs(given, vocabulary)
        first = first_rounds.get(name, 1)
        sites.append(SiteRecord(name, facts["external"], labelled, cases, facts["cases"], first))
    return tuple(sorted(sites, key=lambda site: (site.external, site.name)))


def read_rounds(events: Iterable[Event]) -> tuple[RoundRecord, ...]:
    """Rounds by number. Of a round repeated after a kill, the last one counts."""
    rounds: dict[int, RoundRecord] = {}
    for event in events:
        if event.kind != "round":
            continue
        facts = event.facts
        rounds[int(facts["number"])] = RoundRecord(
            number=int(facts["number"]),
            stage=facts["stage"],
            losses={site: values["loss"] for site, values in facts["sites"].items() if "loss" in values},
            validation=facts["validation"],
            seconds=facts["seconds"],
            bytes_sent=facts["bytes_sent"],
            bytes_received=facts["bytes_received"],
        )
    return tuple(rounds[number] for number in sorted(rounds))


def learning_curves(rounds: Iterable[RoundRecord]) -> Table:
    """One row per round and site: loss, mean validation Dice, and `dice_<structure>` for each that it validates."""
    rows = Table()
    for round_ in rounds:
        validation = round_.validation or {}
        for site in sorted({*round_.losses, *validation}):
            scores = validation.get(site, {})
            row: Row = {"round": round_.number, "stage": round_.stage, "site": site}
            row |= {"loss": round_.losses.get(site, math.nan), "dice": _mean(list(scores.values()))}
            rows.append(row | {f"dice_{structure}": value for structure, value in sorted(scores.items())})
    return rows


def is_ordinary(event: Event) -> bool:
    """Whether an event belongs to every run."""
    return event.kind in _ORDINARY


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
