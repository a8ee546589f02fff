"""The same experiment with other methods as baselines of this run: one column per model, one row per organ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from panorgan.evaluation.metrics import LEADING, METRICS
from panorgan.evaluation.statistics import TEST_SPLIT, Summary, organ_site_table
from panorgan.report.best import best_of
from panorgan.report.comparison_results import ALONE
from panorgan.report.delivered_rounds import delivered_words
from panorgan.report.method_words import describe_method
from panorgan.report.tables import number, title
from panorgan.report.tones import heat_tone
from panorgan.workflows.run import Run
from panorgan.workflows.tables import Row, read_metrics

DIGITS = 2
"""Of a mean Dice in the table."""


@dataclass(frozen=True)
class BaselineModel:
    """This run's model or a baseline's. `organs` has a summary for every organ that it knows; `words` say how it was
    trained, `delivered` from which round it is. `pooled`: it saw all cases in one place."""

    name: str
    words: str
    organs: Mapping[str, Summary]
    overall: Summary
    delivered: str
    is_this_run: bool = False
    pooled: bool = False


@dataclass(frozen=True)
class BaselineCell:
    """A mean, or a note that there is none. `best`: of the models that pool no data."""

    text: str
    tone: str
    spoken: str
    best: bool = False


def baseline_models(run: Run) -> tuple[BaselineModel, ...]:
    """This run's model first, then those of the runs in its `beside` folder; empty when there are none."""
    # Runs scored on other cases cannot be compared.
    tested = run.manifest.get("test_fingerprint")
    found = run.baselines().items()
    others = {method: other for method, other in found if other.manifest.get("test_fingerprint") == tested}
    if not others:
        return ()
    models = [_model(run.manifest["experiment"]["method"]["name"], "this run", run.scores, run, is_this_run=True)]
    for method, other in others.items():
        whole = _model(method, _in_words(other, method), other.scores, other)
        models += [*_own_models(other, method), replace(whole, pooled=describe_method(method).pooled)]
    return tuple(models)


def baseline_rows(models: Sequence[BaselineModel], organs: Sequence[str]) -> list[tuple[str, list[BaselineCell]]]:
    """Per organ one cell per model, and a last row (with an empty name) over what each model knows."""
    rows = [(organ, _organ_cells(organ, models)) for organ in organs]
    return [*rows, ("", [_cell("All it knows", model, model.overall) for model in models])]


def _organ_cells(organ: str, models: Sequence[BaselineModel]) -> list[BaselineCell]:
    found = {model.name: model.organs.get(organ) for model in models}
    means = {model.name: s.mean for model in models if (s := found[model.name]) and not model.pooled}
    best = best_of(means, METRICS[LEADING], DIGITS)
    return [replace(_cell(title(organ), model, found[model.name]), best=model.name in best) for model in models]


@dataclass(frozen=True)
class Gain:
    """A baseline against this run's model, on the organs that the baseline knows: both means, and which is ahead."""

    name: str
    words: str
    known: int
    baseline: float
    this_run: float

    @property
    def difference(self) -> float:
        """The lead of this run's model, in the two digits that are shown."""
        return round(round(self.this_run, 2) - round(self.baseline, 2), 2)


def gains(models: Sequence[BaselineModel]) -> list[Gain]:
    """Every baseline against this run's model on the same organs of the same cases; sites alone come first."""
    if not models:
        return []
    own, *others = models
    found = []
    for model in others:
        known = [organ for organ in model.organs if organ in own.organs]
        means = [_mean_over([m.organs[organ] for organ in known]) for m in (model, own)]
        found.append(Gain(model.name, model.words, len(known), *means))
    return sorted(found, key=lambda gain: (gain.known == len(own.organs), gain.name))


def _mean_over(summaries: Sequence[Summary]) -> float:
    scored = [summary for summary in summaries if summary.n]
    return sum(summary.mean * summary.n for summary in scored) / max(1, sum(summary.n for summary in scored))


def _own_models(run: Run, method: str) -> list[BaselineModel]:
    """Every site's own model, where the method kept them."""
    if not run.own_models_file.is_file():
        return []
    alone = method == ALONE
    words = f"{method}: its own data only" if alone else f"{method}, with its own parts"
    rows = read_metrics(run.own_models_file)
    owners = sorted({row["model"] for row in rows})
    names = {owner: f"{owner} alone" if alone else f"{owner}, {method}" for owner in owners}
    return [_model(names[o], words, [r for r in rows if r["model"] == o], run) for o in owners]


def _in_words(run: Run, method: str) -> str:
    if run.own_models_file.is_file():
        return "the sites’ own models together"
    return "all cases in one place" if describe_method(method).pooled else "federated"


def _model(name: str, words: str, rows: Sequence[Row], run: Run, is_this_run: bool = False) -> BaselineModel:
    table = organ_site_table([row for row in rows if row["split"] == TEST_SPLIT])
    return BaselineModel(name, words, table.organs, table.overall, delivered_words([run]), is_this_run)


def _cell(organ: str, model: BaselineModel, summary: Summary | None) -> BaselineCell:
    if summary is None or not summary.n:
        return BaselineCell("unknown", "", f"{organ}: {model.name} does not know it")
    return BaselineCell(
        number(summary.mean, DIGITS),
        heat_tone(summary.mean),
        f"{organ}, {model.name}: mean Dice {number(summary.mean, 3)}",
    )
