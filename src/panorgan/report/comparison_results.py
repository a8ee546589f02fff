"""The results of a comparison: all finished runs read, tested against the reference, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from panorgan.checksums import read_json
from panorgan.errors import RunError
from panorgan.evaluation.comparison import Comparison, Score, compare_scores, read_scores
from panorgan.evaluation.forgetting import Forgetting, forgetting
from panorgan.evaluation.gap import Gain, gain_over
from panorgan.evaluation.metric_means import Means, compare_means
from panorgan.evaluation.metrics import METRICS, further_metrics
from panorgan.workflows.compare import ComparisonPlan, Failure
from panorgan.workflows.compare_costs import Cost, InferenceTimes, measure_costs, patients_of, time_inference
from panorgan.workflows.run import Run
from panorgan.workflows.tables import Table, read_metrics

ALONE, ALL_LABELS = "solo", "central_full"
"""The methods between which a federation should lie."""


@dataclass(frozen=True)
class MethodForgetting:
    """Mean Dice of the sites' models before they are averaged, and of the global model, over `seeds` seeds.

    `owned`: on organs that the site labels; `others`: on those that it does not.
    """

    local_owned: float
    local_others: float
    global_owned: float
    global_others: float
    seeds: int

    @classmethod
    def of(cls, by_seed: Sequence[Forgetting]) -> MethodForgetting:
        """Means over seeds."""
        averaged = [one.averaged for one in by_seed if one.averaged is not None]
        return cls(
            _mean([one.on_owned for one in by_seed]),
            _mean([one.on_others for one in by_seed]),
            _mean([one.on_owned for one in averaged]),
            _mean([one.on_others for one in averaged]),
            len(by_seed),
        )


@dataclass(frozen=True)
class ComparisonFiles:
    """The files of a comparison, and the prefix of their names."""

    folder: Path
    name: str = "comparison"

    @property
    def markdown(self) -> Path:
        """Tables for a paper's appendix or an issue."""
        return self.folder / f"{self.name}.md"

    @property
    def scores(self) -> Path:
        """Every figure, one per line."""
        return self.folder / f"{self.name}.csv"

    @property
    def costs(self) -> Path:
        """The costs of each method, one per line."""
        return self.folder / f"{self.name}_costs.csv"

    def metric(self, name: str) -> Path:
        """One metric besides Dice, one figure per line."""
        return self.folder / f"{self.name}_{METRICS[name].table_name}.csv"

    @property
    def latex(self) -> Path:
        """The tables of the page for a paper."""
        return self.folder / f"{self.name}.tex"

    @property
    def page(self) -> Path:
        """The page."""
        return self.folder / f"{self.name}.html"

    @property
    def data(self) -> Path:
        """Everything, for programs."""
        return self.folder / f"{self.name}.json"

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file that is written."""
        metrics = [self.metric(metric.name) for metric in further_metrics("comparison")]
        # A metric that was added after the runs were scored has no file.
        there = [path for path in metrics if path.is_file()]
        return (self.page, self.markdown, self.latex, self.scores, *there, self.costs, self.data)


@dataclass(frozen=True)
class Results:
    """All results of a comparison.

    `runs` and `scores` by method, seeds in order. `patients_known` is false when the data was not available to say
    which cases belong to one patient; every case then counts as its own patient. `labelled` are the pairs of a site and
    an organ that it labels itself. `gains` are against every site alone, by method; none where that was not run.
    """

    plan: ComparisonPlan
    runs: Mapping[str, tuple[Run, ...]]
    scores: Mapping[str, tuple[Score, ...]]
    comparison: Comparison
    means: Means
    costs: Mapping[str, Cost]
    inference: InferenceTimes | None
    forgetting: Mapping[str, MethodForgetting]
    failures: Mapping[str, str]
    patients_known: bool
    labelled: frozenset[tuple[str, str]]
    gains: Mapping[str, Gain] = field(default_factory=dict)

    def labelled_here(self, site: str, organ: str) -> bool:
        """Whether a site labels an organ itself."""
        return (site, organ) in self.labelled

    @property
    def table(self) -> Table:
        """Every figure: one row per method, organ (`all` for all together) and place, with mean, interval and p."""
        return Table(figure_rows(self.comparison))

    @property
    def files(self) -> ComparisonFiles:
        """Where it is written."""
        return files_of(self.plan)

    @property
    def missing(self) -> list[str]:
        """Missing runs, each with the reason if it just failed."""
        titles = [run.title for run in self.plan.missing]
        return [f"{title}: {self.failures[title]}" if title in self.failures else title for title in titles]


def figure_rows(
    comparison: Comparison, more: Callable[[str], Mapping[str, object]] = lambda _: {}
) -> Iterator[dict[str, Any]]:
    """One row per method, organ (`all` for all together) and place; `more` columns may follow that of the method."""
    for (method, organ, place), figure in comparison.figures.items():
        where = {"organ": organ or "all", "place": place.kind, "site": place.site}
        yield {"method": method, **more(method), **where, **asdict(figure)}


def files_of(plan: ComparisonPlan) -> ComparisonFiles:
    """Where the files of a comparison, or of an ablation, go."""
    return ComparisonFiles(plan.folder, plan.kind.name)


def compare_runs(plan: ComparisonPlan, failures: Sequence[Failure] = (), cache: Path | None = None) -> Results:
    """Read all finished runs of a comparison, test and measure."""
    if not plan.finished:
        raise RunError(
            f"Not one run of this {plan.kind.name} is finished.",
            code="no-finished-run",
            where=str(plan.folder),
            why="; ".join(f"{failure.run.title}: {failure.error.what}" for failure in failures),
            fix=f"Run the {plan.kind.name} (again, without --report-only).",
        )
    found = [(planned, Run(planned.folder.path)) for planned in plan.finished]  # read again: they may just have ended
    patients = patients_of(plan, cache)
    scores: dict[str, list[Score]] = {label: [] for label in plan.labels}

    def labelled(site: str, organ: str) -> bool:
        # A method that trains on withheld labels reports all organs as labelled everywhere; the others are accurate.
        return all(run.labelled_itself(site, organ) for _, run in found)

    for planned, run in found:
        scores[planned.entry.label] += read_scores(run.scores, planned.seed, labelled, patients or {})
    scored = {score.organ for some in scores.values() for score in some}
    organs = dict.fromkeys(organ for _, run in found for organ in run.organs if organ in scored)
    runs = {label: tuple(run for planned, run in found if planned.entry.label == label) for label in plan.labels}
    comparison = compare_scores(scores, plan.reference, list(organs))
    return Results(
        plan=plan,
        runs=runs,
        scores={label: tuple(some) for label, some in scores.items()},
        comparison=comparison,
        means=metric_means(scores, comparison),
        costs=measure_costs(plan),
        inference=time_inference(plan, _known_times(files_of(plan).data), cache),
        forgetting=_forgetting(runs),
        failures={failure.run.title: failure.error.what for failure in failures},
        patients_known=patients is not None,
        labelled=frozenset((s.site, s.organ) for some in scores.values() for s in some if s.labelled),
        gains=gains_over_alone(plan, scores),
    )


def gains_over_alone(plan: ComparisonPlan, scores: Mapping[str, Sequence[Score]]) -> dict[str, Gain]:
    """By method, its gain over `solo`, and how much of the gap to `central_full` it closes.

    Both as the experiment has them: entries with settings of their own are not the bounds of the others.
    """
    plain = {
        entry.method: entry.label for entry in reversed(plan.entries) if not entry.settings and scores[entry.label]
    }
    alone, full = plain.get(ALONE), plain.get(ALL_LABELS)
    if alone is None:
        return {}
    bound = None if full is None else scores[full]
    gains = {
        label: gain_over(some, scores[alone], bound, name=label) for label, some in scores.items() if label != alone
    }
    return {label: gain for label, gain in gains.items() if gain is not None}


def metric_means(scores: Mapping[str, Sequence[Score]], comparison: Comparison) -> Means:
    """Of every metric besides Dice that comparisons or ablations show."""
    values = [score.values for some in scores.values() for score in some]
    shown = [*further_metrics("comparison", values), *further_metrics("ablation", values)]
    return {name: compare_means(scores, comparison, name) for name in dict.fromkeys(metric.name for metric in shown)}


def _known_times(path: Path) -> InferenceTimes | None:
    """The times measured by an earlier comparison in this folder."""
    try:
        return InferenceTimes(**read_json(path.read_bytes())["inference"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _forgetting(runs: Mapping[str, Sequence[Run]]) -> dict[str, MethodForgetting]:
    """Per method, means over the seeds whose local models were scored."""
    found = {}
    for label, seeds in runs.items():
        by_seed = [_of_local_models(run) for run in seeds if run.local_models_file.is_file()]
        if by_seed:
            found[label] = MethodForgetting.of(by_seed)
    return found


def _of_local_models(run: Run) -> Forgetting:
    owned = {site.name: site.labelled for site in run.training_sites}
    return forgetting(read_metrics(run.local_models_file), owned)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
