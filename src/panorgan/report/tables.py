"""Numbers of the page: summaries per organ and site, with their texts and colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from panorgan.anatomy import catalogue
from panorgan.evaluation.metrics import LEADING, Metric, further_metrics
from panorgan.evaluation.statistics import (
    EXTERNAL_SPLIT,
    TEST_SPLIT,
    Summary,
    Table,
    organ_site_table,
    summarise,
)
from panorgan.report.tones import heat_tone
from panorgan.workflows.run import Run
from panorgan.workflows.tables import Row

NOTHING = "–"


@dataclass(frozen=True)
class Scores:
    """Summaries of every metric shown. `external` is metric → organ → summary over all external sites.

    `further` are the metrics shown besides Dice.
    `own` covers organs at test sites that labelled them in training, `others` organs at test sites that never did.
    """

    further: Sequence[Metric]
    tables: Mapping[str, Table]
    external: Mapping[str, Mapping[str, Summary]]
    own: Summary
    others: Summary
    test_cases: int
    external_cases: int

    @property
    def dice(self) -> Table:
        """The main table of the page."""
        return self.tables[LEADING]


@dataclass(frozen=True)
class HeatCell:
    """One field of the heat map: a site, or the federation. `own`: the site labelled the organ itself."""

    place: str
    text: str
    tone: str
    own: bool
    spoken: str


@dataclass(frozen=True)
class HeatRow:
    """One organ of the heat map, or all of them together when `organ` is empty."""

    organ: str
    inside: tuple[HeatCell, ...]
    federation: HeatCell
    outside: tuple[HeatCell, ...]


@dataclass(frozen=True)
class AnnotationCell:
    """What a site knows of an organ: `state` is annotated, unknown or external."""

    state: str
    cases: int | None


@dataclass(frozen=True)
class Cost:
    """The costs of the run. Seconds by phase; bytes as the server counted them."""

    rounds: int
    seconds: Mapping[str, float]
    sent: int
    received: int

    @property
    def total_seconds(self) -> float:
        """All phases together."""
        return sum(self.seconds.values())


def make_scores(run: Run) -> Scores:
    """Summarise the rows of metrics.csv; intervals resample cases."""
    rows = run.scores
    further = further_metrics("report", rows)
    metrics = (LEADING, *(metric.name for metric in further))
    test = [row for row in rows if row["split"] == TEST_SPLIT]
    own = [row for row in test if run.labelled_itself(row["site"], row["organ"])]
    others = [row for row in test if not run.labelled_itself(row["site"], row["organ"])]
    outside = [row for row in rows if row["split"] == EXTERNAL_SPLIT]
    # Taken alone, the external sites are summarised per organ exactly as the federation is.
    relabelled = [{**row, "split": TEST_SPLIT} for row in outside]
    return Scores(
        further=further,
        tables={metric: organ_site_table(rows, metric) for metric in metrics},
        external={metric: organ_site_table(relabelled, metric).organs for metric in metrics},
        own=_dice_of(own),
        others=_dice_of(others),
        test_cases=_count_cases(test),
        external_cases=_count_cases(outside),
    )


def heat_map(run: Run, scores: Scores) -> list[HeatRow]:
    """Mean Dice per organ and site, in the order of the run, and a last row over all organs."""
    table = scores.dice

    def row(organ: str, summaries: Mapping[str, Summary], federation: Summary | None) -> HeatRow:
        words = title(organ) if organ else "All organs"
        cells = {
            site.name: _heat_cell(words, site.name, summaries.get(site.name), organ in site.labelled)
            for site in run.sites
        }
        return HeatRow(
            organ=organ,
            inside=tuple(cells[site.name] for site in run.training_sites),
            federation=_heat_cell(words, "federation", federation, own=False),
            outside=tuple(cells[site.name] for site in run.external_sites),
        )

    rows = [
        row(organ, {site: s for (o, site), s in table.cells.items() if o == organ}, table.organs.get(organ))
        for organ in run.organs
    ]
    return [*rows, row("", table.sites, table.overall)]


def _heat_cell(words: str, place: str, summary: Summary | None, own: bool) -> HeatCell:
    mean = summary.mean if summary else math.nan
    spoken = f"{words}, {place}: not scored"
    if summary and summary.n:
        spoken = f"{words}, {place}: mean Dice {number(mean)}, {plural(summary.n, 'score')}"
    if own:
        spoken += ", labelled by this site"
    return HeatCell(place, number(mean), heat_tone(mean), own, spoken)


def annotation_matrix(run: Run) -> list[tuple[str, list[AnnotationCell]]]:
    """Per organ of the vocabulary, what each site knows of it."""

    def cell(organ: str, index: int) -> AnnotationCell:
        site = run.sites[index]
        if site.external:
            return AnnotationCell("external", None)
        if organ in site.labelled:
            return AnnotationCell("annotated", site.labelled_cases.get(organ))
        return AnnotationCell("unknown", None)

    return [(organ, [cell(organ, i) for i in range(len(run.sites))]) for organ in run.vocabulary]


def make_cost(run: Run) -> Cost | None:
    """Totals over the rounds; None when no round was logged."""
    if not run.rounds:
        return None
    phases = list(dict.fromkeys(phase for round_ in run.rounds for phase in round_.seconds))
    return Cost(
        rounds=len(run.rounds),
        seconds={phase: sum(r.seconds.get(phase, 0.0) for r in run.rounds) for phase in phases},
        sent=sum(round_.bytes_sent for round_ in run.rounds),
        received=sum(round_.bytes_received for round_ in run.rounds),
    )


# -- words and colours -------------------------------------------------------------------------------------


def title(organ: str) -> str:
    """The organ's readable name."""
    return catalogue()[organ].title


def number(value: float | None, digits: int = 2) -> str:
    """A score or a distance; a dash when it is not defined."""
    return NOTHING if value is None or math.isnan(value) else f"{value:.{digits}f}"


def interval(summary: Summary | None, digits: int = 2) -> str:
    """``0.81 to 0.92``; a dash with a single case to draw from."""
    if summary is None or math.isnan(summary.low) or summary.low == summary.high:
        return NOTHING
    return f"{summary.low:.{digits}f} to {summary.high:.{digits}f}"


def mean_sd(summary: Summary | None, digits: int = 3) -> str:
    """``0.874 ± 0.031``; without spread when there is only one value."""
    if summary is None or not summary.n:
        return NOTHING
    spread = "" if math.isnan(summary.sd) else f" ± {summary.sd:.{digits}f}"
    return f"{summary.mean:.{digits}f}{spread}"


def size(count: float) -> str:
    """Bytes in readable form, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Time in readable form: ``0.4 s``, ``3 min 20 s``, ``5 h 12 min``."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds >= 0.01 else ("under 0.01 s" if seconds > 0 else "0 s")
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def plural(count: int, word: str) -> str:
    """``1 site``, ``3 sites``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def spell_number(count: int) -> str:
    """Small numbers as words, for running text."""
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
    return words[count] if count < len(words) else f"{count:,}"


FILTERS: dict[str, Callable[..., str]] = {
    "number": number,
    "interval": interval,
    "mean_sd": mean_sd,
    "size": size,
    "duration": duration,
    "plural": plural,
    "spell_number": spell_number,
    "title_of": title,
}
"""Functions for the template."""


def _dice_of(rows: Sequence[Row]) -> Summary:
    return summarise(
        [row["dice"] for row in rows],
        missed=sum(row["missed"] for row in rows),
        groups=[(row["site"], row["case"]) for row in rows],
    )


def _count_cases(rows: Sequence[Row]) -> int:
    return len({(row["site"], row["case"]) for row in rows})
