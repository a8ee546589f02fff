"""A module table of eleven rows with scores made by hand, as a comparison that was never run."""

from __future__ import annotations

from pathlib import Path

from made_comparison import results_of

from panorgan.evaluation.comparison import Score
from panorgan.methods.shared.ablation import AblationRow, all_modules
from panorgan.report.comparison_results import Results
from panorgan.workflows.ablate import ABLATION, Ablation
from panorgan.workflows.compare import ComparisonPlan
from panorgan.workflows.compare_entries import Entry

SITES = ("north", "south", "west")
MODULES = ("PL", "aRCE", "WS", "UA", "GMT", "sUSAM")
COMBINED = ("PL", "PL+aRCE", "PL+WS", "PL+UA", "PL+GMT", "PL+sUSAM", "PL+aRCE+WS", "PL+aRCE+WS+UA")
ROWS = (*COMBINED, "PL+aRCE+WS+UA+GMT", "all")


class Made(Ablation):
    """Its modules are its own: no method is registered for it."""

    @property
    def modules(self) -> tuple[str, ...]:
        return all_modules(self.rows)


def made_ablation(
    external: tuple[str, ...] = ("island",), gain: float = 0.1, paper: bool = True, seeds: tuple[int, ...] = (0, 1)
) -> tuple[Ablation, Results]:
    """Six patients per site. SOLO has Dice 0.4, PL 0.6, every other row `gain` more; seeds add 0.02, external −0.1."""
    reported = {"SOLO": "70.05", "PL": "73.07"} if paper else {}
    rows = [AblationRow("SOLO", (), method="solo", paper=reported.get("SOLO", ""))]
    for label in ROWS:
        modules = MODULES if label == "all" else tuple(label.split("+"))
        rows.append(AblationRow(label, modules, paper=reported.get(label, "")))
    dice = {row.label: 0.4 if row.label == "SOLO" else 0.6 + gain * (row.label != "PL") for row in rows}
    scores = {
        label: [
            Score(
                seed,
                "external" if site in external else "test",
                site,
                f"{site}-{patient}",
                f"{site}-{patient}",
                "liver",
                {"dice": value + 0.02 * seed - 0.1 * (site in external), "assd": 1.0},
                site == "north",
            )
            for seed in seeds
            for site in (*SITES, *external)
            for patient in range(6)
        ]
        for label, value in dice.items()
    }
    entries = tuple(Entry(row.label, row.method or "ufps", row.settings) for row in rows)
    plan = ComparisonPlan("made", Path("nowhere"), entries, seeds, "PL", (), ABLATION)
    return Made("ufps", tuple(rows), plan), results_of(plan, scores, ["liver"])
