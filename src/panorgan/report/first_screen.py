"""The first screen of a run's page, besides the mean: where it is worst, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from panorgan.evaluation.statistics import Summary
from panorgan.report.tables import Scores, number, plural, title
from panorgan.workflows.run import Run

_POOR = 0.5
"""Below this mean Dice, an organ is not segmented."""


@dataclass(frozen=True)
class Worst:
    """The organ or site with the lowest mean Dice."""

    name: str
    summary: Summary


@dataclass(frozen=True)
class Step:
    """Something to do: a sentence, and a command where there is one."""

    words: str
    command: str = ""


def worst_organ(run: Run, scores: Scores) -> Worst | None:
    """In the federation; None where there are fewer than two to choose from."""
    found = _worst({organ: scores.dice.organs[organ] for organ in run.organs if organ in scores.dice.organs})
    return Worst(title(found.name), found.summary) if found else None


def worst_site(scores: Scores) -> Worst | None:
    """Of all sites, external ones included."""
    return _worst(scores.dice.sites)


def next_steps(run: Run, scores: Scores, has_baselines: bool, pooled: bool) -> list[Step]:
    """Suggestions, the most useful first."""
    steps = []
    poor = [organ for organ in run.organs if (s := scores.dice.organs.get(organ)) and s.n and s.mean < _POOR]
    if poor:
        names = ", ".join(title(organ) for organ in poor[:4]) + (f" and {len(poor) - 4} more" if len(poor) > 4 else "")
        hint = "See whether the sites’ labels agree and whether the loss still falls."
        steps.append(Step(f"{names}: mean Dice below {number(_POOR)}. {hint}"))
    noticed = [
        event for event in run.notable_events if event.kind == "notice" and event.facts.get("code") != "extended"
    ]
    if noticed:
        last = noticed[-1].facts
        words = f"Read {plural(len(noticed), 'notice')} of the run, under “Notices”. The last, of round"
        steps.append(Step(f"{words} {last.get('number', '?')}: {last.get('text', '')}"))
    if run.rounds and run.delivered_round == run.rounds[-1].number and not math.isnan(run.rounds[-1].mean_dice):
        steps.append(Step("The last round is the best one: more rounds may help.", "--set training.rounds=…"))
    if not has_baselines and not pooled:
        own = run.manifest["experiment"]["method"]["name"]
        command = f"panorgan compare EXPERIMENT.yaml --methods solo,{own}"
        steps.append(Step("Does the federation pay? Compare it with every site alone.", command))
    return steps


def last_step(scores: Scores) -> str:
    """The commands to look at a run, which are always suggested."""
    missed = scores.dice.overall.missed + scores.dice.external.missed
    return f"Look at {'what was missed' if missed else 'the worst cases'} first:"


def _worst(found: Mapping[str, Summary]) -> Worst | None:
    scored = {name: summary for name, summary in found.items() if summary.n}
    if len(scored) < 2:
        return None
    name = min(scored, key=lambda one: scored[one].mean)
    return Worst(name, scored[name])
