"""What each site forgets: the sites' models of one round before they were averaged, and the averaged one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from panorgan.evaluation.forgetting import Forgetting, ModelScores, forgetting
from panorgan.federation.local_models import round_to_keep
from panorgan.report.tables import HeatCell, number, title
from panorgan.report.tones import heat_tone
from panorgan.workflows.run import Run
from panorgan.workflows.tables import read_metrics


@dataclass(frozen=True)
class ForgettingRow:
    """One model: a cell per organ, and the means over the organs that its site labels and does not label."""

    name: str
    words: str
    cells: tuple[HeatCell, ...]
    on_owned: HeatCell
    on_others: HeatCell


@dataclass(frozen=True)
class ForgettingTable:
    """The sites' models of a round by name, then the averaged one. `scores` hold the means for the text."""

    round: int

    organs: tuple[str, ...]
    local: tuple[ForgettingRow, ...]
    averaged: ForgettingRow | None
    scores: Forgetting


def forgetting_table(run: Run) -> ForgettingTable | None:
    """The table of a run; None where no local models were kept."""
    if not run.local_models_file.is_file():
        return None
    owned = {site.name: site.labelled for site in run.training_sites}
    scores = forgetting(read_metrics(run.local_models_file), owned)
    found = {organ for model in scores.local.values() for organ in model.organs}
    organs = tuple(organ for organ in run.organs if organ in found)

    def row(name: str, words: str, model: ModelScores, own: frozenset[str]) -> ForgettingRow:
        cells = (_cell(name, title(o), model.organs.get(o, math.nan), o in own) for o in organs)
        on_owned = _cell(name, "organs it labels", model.on_owned)
        return ForgettingRow(name, words, tuple(cells), on_owned, _cell(name, "other organs", model.on_others))

    local = tuple(
        row(site, "labels " + ", ".join(title(o) for o in organs if o in owned[site]), model, owned[site])
        for site, model in scores.local.items()
    )
    averaged = row("Global model", "after averaging", scores.averaged, frozenset()) if scores.averaged else None
    return ForgettingTable(_round_of(run), organs, local, averaged, scores)


def _round_of(run: Run) -> int:
    """The round whose models were kept."""
    experiment = run.experiment
    return round_to_keep(experiment.build_method().stages(experiment.training.rounds), experiment.local_models)


def _cell(model: str, words: str, dice: float, own: bool = False) -> HeatCell:
    spoken = f"{model}, {words}: " + ("not scored" if math.isnan(dice) else f"mean Dice {number(dice)}")
    if own:
        spoken += ", labelled by this site"
    return HeatCell(f"model {model}", number(dice), heat_tone(dice), own, spoken)
