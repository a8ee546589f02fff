"""The first table of docs/results.md: every method on every data set, row by row one comparison with one setting."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).parent / "results"
PART_PER_ORGAN = "a part per organ"
METHODS = (
    "solo",
    "fedavg",
    "fedprox",
    "scaffold",
    PART_PER_ORGAN,
    "multihead",
    "segviz",
    "flkd",
    "fedavg_pl",
    "ufps",
    "multidecoder",
    "fediod",
    "chorus",
    "central_full",
)
ALONE, ALL_LABELS = "solo", "central_full"
POOLED = {ALL_LABELS}
OTHER_NAMES = {"fedavg_heads": PART_PER_ORGAN, "conventional": PART_PER_ORGAN}
NOT_SHOWN = {"flkd_global", "flkd_local"}  # halves of a method: in their own section
STEP_COSTS = {  # method → what was measured, relative to which method
    "flkd": (("flkd_both",), PART_PER_ORGAN),
    "ufps": (("ufps", "ufps_susam"), "fedavg"),
    "fediod": (("fediod",), "multidecoder"),
}


@dataclass(frozen=True)
class Row:
    """One comparison: the data set, its setting in a line, and the file (and the set within it)."""

    data: str
    setting: str
    file: str
    part: str = ""


NOW = (
    Row("phantom, 3 sites", "40 × 20", "federation_pays_h200", "phantom"),
    Row("phantom, small", "50 × 5, `examples/phantom.yaml` as it is", "federation_pays_h200", "phantom, small budget"),
    Row("phantom, harder", "40 × 20", "chorus_h200", "phantom, harder"),
    Row("ACDC 2D", "40 × 20", "chorus_h200", "ACDC 2D"),
    Row("ACDC 3D", "40 × 20", "chorus_h200", "ACDC 3D"),
    Row("hippocampus", "40 × 20", "federation_pays_h200", "hippocampus"),
    Row("CHAOS", "40 × 20", "federation_pays_h200", "CHAOS"),
    Row("CHAOS", "100 × 20", "federation_pays_h200", "CHAOS, 100 rounds"),
    Row("CHAOS, all methods ‡", "40 × 20, another run", "quality_h200", "CHAOS"),
)
EARLIER = (
    Row("phantom, 3 sites", "150 × 10", "ufps_phantom_three_sites_h200"),
    Row("phantom, 3 sites", "80 × 8, features 8 to 32, 7 mm", "flkd_phantom_three_sites_cpu"),
    Row("phantom, 4 sites, an organ each", "100 × 10", "segviz_phantom_four_sites_h200"),
    Row("ACDC 2D", "100 × 30; half as long teachers, FedIOD refreshed every 5 rounds", "fediod_acdc_h200"),
    Row("ACDC 3D", "60 × 10", "ufps_acdc_h200"),
    Row("hippocampus", "50 × 8", "flkd_hippocampus_h200"),
)


@dataclass(frozen=True)
class Cell:
    """A method in a row: mean Dice over seeds, and its worst organ where organs were kept."""

    dice: float
    seeds: int
    organ: str = ""
    organ_dice: float = 0.0


def overview() -> str:
    """The table."""
    titles = [name if name == PART_PER_ORGAN else f"`{name}`" for name in METHODS]
    lines = [[f"**{words}**", *[""] * len(METHODS)] for words in ("Today's defaults", "Earlier code †")]
    rows = [lines[0], *map(_row, NOW), lines[1], *map(_row, EARLIER), _cost_row()]
    return markdown_table(["rounds × steps, seeds", *titles], rows)


def cells_of(row: Row) -> dict[str, Cell]:
    """What the file has of every method in the federation, by its name in the table."""
    content = read(row.file)
    if "comparison" in content:
        found = _of_comparison(content["comparison"])
    else:
        found = {name: _of_seeds(one.get("seeds", one)) for name, one in _methods(content["sets"][row.part]).items()}
    return {OTHER_NAMES.get(name, name): cell for name, cell in found.items() if name not in NOT_SHOWN}


def _methods(part: Mapping[str, Any]) -> Mapping[str, Any]:
    methods: Mapping[str, Any] = part.get("methods", part)
    return methods


def _of_seeds(seeds: Mapping[str, Any]) -> Cell:
    """From a mean per seed, and means per organ where they were kept."""
    runs = list(seeds.values())
    organs = {organ: fmean(run["organs"][organ] for run in runs) for organ in runs[0].get("organs", {})}
    worst = min(organs, key=lambda organ: organs[organ], default="")
    return Cell(fmean(run["mean"] for run in runs), len(runs), worst, organs.get(worst, 0.0))


def _of_comparison(comparison: Mapping[str, Any]) -> dict[str, Cell]:
    """From the figures of a comparison."""
    found = {}
    for method in comparison["methods"]:
        own = [f for f in comparison["figures"] if f["method"] == method and f["place"] == "federation"]
        (whole,) = [figure for figure in own if figure["organ"] == "all"]
        worst = min((figure for figure in own if figure["organ"] != "all"), key=lambda figure: figure["mean"])
        found[method] = Cell(whole["mean"], whole["seeds"], worst["organ"], worst["mean"])
    return found


def _row(row: Row) -> list[str]:
    found = cells_of(row)
    if unknown := set(found) - set(METHODS):
        raise ValueError(f"{row.file}: the first table has no column for {', '.join(sorted(unknown))}")
    seeds = {cell.seeds for cell in found.values()}
    best = _best(found) if len(seeds) == 1 else set()
    said = f"{row.setting}, {_seeds(max(seeds))}"
    texts = [
        _text(found[name], name in best, max(seeds), _gap(found, name)) if name in found else "" for name in METHODS
    ]
    return [f"{row.data}<br><small>{said}</small>", *texts]


def _best(found: Mapping[str, Cell]) -> set[str]:
    """The best of those that pool no data, among the digits shown."""
    shown = {name: round(cell.dice, 3) for name, cell in found.items() if name not in POOLED}
    return (
        {name for name, dice in shown.items() if dice == max(shown.values())} if len(set(shown.values())) > 1 else set()
    )


def _gap(found: Mapping[str, Cell], name: str) -> float | None:
    """How much of the way from every site alone to all labels in one place a method goes."""
    if name in (ALONE, *POOLED) or not {ALONE, ALL_LABELS} <= found.keys():
        return None
    alone = found[ALONE].dice
    return (found[name].dice - alone) / (found[ALL_LABELS].dice - alone)


def _text(cell: Cell, best: bool, seeds: int, gap: float | None) -> str:
    lines = [f"**{cell.dice:.3f}**" if best else f"{cell.dice:.3f}"]
    if cell.seeds != seeds:
        lines.append(f"<small>{_seeds(cell.seeds)}</small>")
    if gap is not None:
        lines.append(f"<small>gap {gap:.0%}</small>")
    if cell.organ:
        lines.append(f"<small>{_organ(cell.organ)} {cell.organ_dice:.2f}</small>")
    return "<br>".join(lines)


def _seeds(count: int) -> str:
    return f"{count} seed{'' if count == 1 else 's'}"


def _organ(name: str) -> str:
    """A short name: `left kidney`, `myocardium`, `anterior`."""
    words = name.removeprefix("heart_").removeprefix("hippocampus_").split("_")
    return " ".join([words[-1], *words[:-1]] if words[-1] in ("left", "right") else words)


def _cost_row() -> list[str]:
    """What a training step costs, relative to the step of another method."""
    measured = step_costs("step_cost_h200.json", ("bfloat16", "graphs"))
    chorus = read("chorus_h200")["step_cost"]["chorus"]
    texts = {"chorus": f"{chorus:.2f} × fedavg"} | {
        method: f"{' to '.join(f'{measured[name]:.2f}' for name in names)} × {reference}"
        for method, (names, reference) in STEP_COSTS.items()
    }
    return ["**a training step**<br><small>H200, bfloat16</small>", *(texts.get(name, "") for name in METHODS)]


# -- shared with the page --------------------------------------------------------------------------------------


def read(name: str) -> dict[str, Any]:
    """A file of results."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def step_costs(file: str, entries: Sequence[str]) -> dict[str, float]:
    """Relative costs by label, the last entry first."""
    content = json.loads((RESULTS / file).read_text())
    return {label: value for entry in entries for label, value in content[entry].items()}


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
