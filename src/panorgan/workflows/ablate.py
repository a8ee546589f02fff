"""Ablations: a comparison whose entries are the rows of a method's table (`Method.ablation`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from panorgan.config import Experiment
from panorgan.errors import ConfigError, did_you_mean
from panorgan.methods.registry import find_method, methods
from panorgan.methods.shared.ablation import AblationRow, all_modules
from panorgan.workflows.compare import ComparisonPlan, plan_runs
from panorgan.workflows.compare_entries import Entry, Kind, parse_seeds

ABLATION = Kind(
    "ablation", "row", "--rows", "Remove the module's switch from the experiment's method section, or choose --rows."
)


@dataclass(frozen=True)
class Ablation:
    """The requested rows of a method's table, simplest first, and the runs that they need."""

    method: str
    rows: tuple[AblationRow, ...]
    plan: ComparisonPlan

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that are on in some row, in the order of the paper's table."""
        shown = all_modules(self.rows)
        return tuple(module for module in all_modules(find_method(self.method).ablation) if module in shown)


def plan_ablation(
    experiment: Experiment,
    method: str | None = None,
    rows: str | None = None,
    seeds: str = "0,1,2",
    reference: str | None = None,
    folder: Path | None = None,
) -> Ablation:
    """Everything that an ablation will run, checked as far as possible without data.

    `method` defaults to the experiment's own; `rows` are labels as on the command line, all of them if left out.
    The reference is the first row that is the method itself, in its simplest form. Every row delivers its last round:
    the best round may lie before a module begins, and would then equal that of another row.
    """
    experiment = experiment.model_copy(update={"training": experiment.training.model_copy(update={"select": "last"})})
    name = method or str(experiment.method["name"])
    chosen = _chosen(_table(name), rows)
    if reference is None:
        reference = next((row.label for row in chosen if row.method is None), chosen[0].label)
    else:
        reference = _find(chosen, reference, "--reference").label
    entries = [Entry(row.label, row.method or name, row.settings) for row in chosen]
    folder = folder or Path("runs") / f"{experiment.name}-ablate-{name}"
    return Ablation(name, chosen, plan_runs(experiment, entries, parse_seeds(seeds), reference, folder, ABLATION))


def _table(name: str) -> tuple[AblationRow, ...]:
    table = find_method(name).ablation
    if not table:
        known = [other for other, found in methods().items() if found.ablation]
        raise ConfigError(
            f"The method {name!r} has no ablation table.",
            code="no-ablation-table",
            where="--method",
            why="it declares no rows (Method.ablation)",
            fix=f"Choose one that has a table: {', '.join(known)}.",
        )
    return table


def _chosen(table: Sequence[AblationRow], text: str | None) -> tuple[AblationRow, ...]:
    """The rows of a table that are named, in the table's order."""
    if text is None:
        return tuple(table)
    wanted = {_find(table, piece.strip(), "--rows").label for piece in text.split(",") if piece.strip()}
    if not wanted:
        raise ConfigError("No row is named.", code="no-row", where="--rows", fix=f"Choose from: {_listed(table)}.")
    return tuple(row for row in table if row.label in wanted)


def _find(rows: Sequence[AblationRow], label: str, option: str) -> AblationRow:
    """A row by its label, case-insensitive."""
    known = {row.label.lower(): row for row in rows}
    if label.lower() not in known:
        raise ConfigError(
            f"There is no row called {label!r}.",
            code="unknown-row",
            where=option,
            why=_near(label, known),
            fix=f"Choose from: {_listed(rows)}.",
        )
    return known[label.lower()]


def _near(label: str, known: Mapping[str, AblationRow]) -> str:
    """A hint at rows with similar names."""
    hint = did_you_mean(label, known)
    for small, row in known.items():
        hint = hint.replace(repr(small), repr(row.label))
    return hint


def _listed(rows: Sequence[AblationRow]) -> str:
    return ", ".join(row.label for row in rows)
