"""The table of every method on several data sets in docs/results.md, from what `quality.py` wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from panorgan.methods.registry import methods
from results_overview import markdown_table

TITLES = {"hard_3": "phantom, harder", "acdc_2d": "ACDC 2D", "acdc_3d": "ACDC 3D", "chaos": "CHAOS"}


def table_of_methods(sets: Mapping[str, Any], step_costs: Mapping[str, float]) -> str:
    """A line per method, the best first: Dice with NSD, gap closed and worst organ per set; then its costs.

    `sets` are those of `quality.py`; `step_costs` are relative to FedAvg's step. The order is that of the mean Dice
    over the data sets; a method that misses one comes after those that have all.
    """
    by_method: dict[str, list[Mapping[str, Any] | None]] = {}
    for name in sorted({name for one in sets.values() for name in one["methods"]}):
        by_method[name] = [one["methods"].get(name) for one in sets.values()]
    lines = [
        [f"`{name}`", *map(_cell, found), *([_cost(step_costs.get(name))] if step_costs else []), _payload(name, found)]
        for name, found in sorted(by_method.items(), key=lambda item: _rank(item[1]))
    ]
    titles = [TITLES.get(name, name) for name in sets]
    return markdown_table(["method", *titles, *(["step"] if step_costs else []), "MB per round"], lines)


def _rank(found: Sequence[Mapping[str, Any] | None]) -> tuple[int, float]:
    """Complete lines first, then the highest mean."""
    means = [_mean(one, "mean") for one in found if one]
    return sum(one is None for one in found), -fmean(means)


def _mean(one: Mapping[str, Any], key: str) -> float:
    return fmean(seed[key] for seed in one["seeds"].values())


def _cell(one: Mapping[str, Any] | None) -> str:
    """Dice and NSD; gap closed; the organ that does worst against every site alone."""
    if one is None:
        return ""
    dice, nsd = _mean(one, "mean"), _mean(one, "nsd")
    lines = [f"{dice:.3f}" + ("" if math.isnan(nsd) else f" / {nsd:.2f}")]
    if share := one.get("gap", {}).get("inside"):
        lines.append(f"<small>gap {share['closed']:.0%}</small>")
    if worst := one.get("worst_organ"):
        lines.append(f"<small>{worst['organ']} {worst['ratio']:.2f}</small>")
    return "<br>".join(lines)


def _cost(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _payload(name: str, found: Sequence[Mapping[str, Any] | None]) -> str:
    """What is sent in a round, on the first data set that has the method; nothing where scans are pooled."""
    if name in methods() and methods()[name].pooled:
        return ""
    sent = next((one["bytes_per_round"] for one in found if one and "bytes_per_round" in one), None)
    return "" if sent is None else f"{sent / 1e6:.1f}"
