"""All that a report tells, read from a run folder: who took part, every round, every score."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panorgan.anatomy import Vocabulary, catalogue
from panorgan.checksums import read_json
from panorgan.errors import RunError
from panorgan.evaluation.forgetting import organs_taught
from panorgan.evaluation.metrics import is_missed
from panorgan.federation.events import Event, read_events
from panorgan.runs.folder import RunFolder
from panorgan.runs.scoring import Row, read_metrics

# These tell of an ordinary course. Whatever else is logged is worth a line on the page.
_ORDINARY = {"started", "split", "joined", "round", "finished"}


@dataclass(frozen=True)
class SiteRecord:
    """One site: what it annotated and how many cases it gave.

    `labelled` holds the organs of the vocabulary that its annotations cover, and the structures as it named them.
    `labelled_cases` counts training cases per such name, as far as the run wrote it down. `joined_in` is the first
    round it took part in.
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
        means = [sum(d.values()) / len(d) for d in (self.validation or {}).values() if d]
        return sum(means) / len(means) if means else math.nan

    def organ_dice(self, organ: str) -> float:
        """Mean over the sites that validate this organ; NaN where none does."""
        known = [d[organ] for d in (self.validation or {}).values() if organ in d]
        return sum(known) / len(known) if known else math.nan


@dataclass(frozen=True)
class RunRecord:
    """A finished run.

    `organs` are the vocabulary in its order, then scored structures that are unions of it (such as both kidneys).
    `sites` are those that trained, then external ones. `rows` carry a `missed` flag.
    """

    folder: RunFolder
    manifest: Mapping[str, Any]
    card: Mapping[str, Any]
    vocabulary: Vocabulary
    organs: tuple[str, ...]
    sites: tuple[SiteRecord, ...]
    rounds: tuple[RoundRecord, ...]
    happenings: tuple[Event, ...]
    rows: tuple[Row, ...]

    @property
    def training_sites(self) -> tuple[SiteRecord, ...]:
        """The sites that trained."""
        return tuple(site for site in self.sites if not site.external)

    @property
    def external_sites(self) -> tuple[SiteRecord, ...]:
        """The sites that were only scored."""
        return tuple(site for site in self.sites if site.external)

    @property
    def is_ct(self) -> bool:
        """Whether intensities are HU, so that the usual windows apply."""
        # Runs of before plans were pooled say it in the experiment alone.
        plan = self.manifest.get("plan") or self.manifest["experiment"].get("plan", {})
        return bool(plan.get("intensity", "window") == "window")

    @property
    def delivered_round(self) -> int | None:
        """The round whose weights are in the delivered model."""
        return int(self.card["round"]) if "round" in self.card else None

    @property
    def total_rounds(self) -> int | None:
        """Rounds of all stages; None where the log has none."""
        return self.rounds[-1].number if self.rounds else None

    def labelled_itself(self, site: str, organ: str) -> bool:
        """Whether the site annotated this organ in its own training cases."""
        return any(organ in record.labelled for record in self.sites if record.name == site)


def title(organ: str) -> str:
    """The organ's name for people."""
    return catalogue()[organ].title


def read_record(path: Path) -> RunRecord:
    """Read a run folder; a folder without manifest or scores is refused."""
    folder = RunFolder(path)
    manifest = folder.read_manifest()
    rows = tuple(_with_missed(row) for row in read_metrics(folder.metrics))
    events = list(read_events(folder.events))
    try:
        vocabulary = Vocabulary(manifest["experiment"]["vocabulary"])
        unions = sorted({row["organ"] for row in rows} - set(vocabulary))
        return RunRecord(
            folder=folder,
            manifest=manifest,
            card=_read_card(folder),
            vocabulary=vocabulary,
            organs=(*vocabulary, *unions),
            sites=_read_sites(manifest["sites"], vocabulary, events),
            rounds=_read_rounds(events),
            happenings=tuple(event for event in events if event.kind not in _ORDINARY),
            rows=rows,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(
            "The files of this run cannot be understood.",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix="They are damaged or from another panorgan version. Use the version that wrote them.",
        ) from error


def _with_missed(row: Row) -> Row:
    return {**row, "missed": is_missed(row)}


def _read_card(folder: RunFolder) -> dict[str, Any]:
    """The model's card; empty when the model was taken away, because scores can be shown without it."""
    try:
        card: dict[str, Any] = read_json((folder.model / "model.json").read_bytes())
        return card
    except OSError:
        return {}
    except ValueError as error:
        raise RunError(
            "The card of this run's model is damaged.",
            where=str(folder.model / "model.json"),
            why=str(error),
            fix="Restore the file from a backup. Without the folder of the model the scores can still be shown.",
        ) from error


def _read_sites(content: Mapping[str, Any], vocabulary: Vocabulary, events: Iterable[Event]) -> tuple[SiteRecord, ...]:
    joined: dict[str, Any] = {}
    first_rounds: dict[str, int] = {}
    for event in events:
        if event.kind == "joined":
            joined |= event.facts["sites"]
        elif event.kind == "late_join":
            joined[event.facts["site"]] = event.facts
            first_rounds[event.facts["site"]] = int(event.facts["number"])
    sites = []
    for name, facts in content.items():
        given = {structure: organs_taught([structure], vocabulary) for structure in facts["annotated"]}
        counts = joined.get(name, {}).get("annotated", {})
        cases = {n: counts[s] for s, names in given.items() if s in counts for n in names}
        labelled = organs_taught(given, vocabulary)
        first = first_rounds.get(name, 1)
        sites.append(SiteRecord(name, facts["external"], labelled, cases, facts["cases"], first))
    return tuple(sorted(sites, key=lambda site: (site.external, site.name)))


def _read_rounds(events: Iterable[Event]) -> tuple[RoundRecord, ...]:
    """Rounds by number. A round that a kill made happen twice counts as it went the last time."""
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
