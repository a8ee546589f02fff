"""Every method on every example, several seeds, equal budgets: is an organ lost, and who is better off alone?

    python benchmarks/quality.py [--sets phantom,chaos] [--methods all] [--seeds 0,1,2] [--at-once 24] \
        [--minutes 9] [--runs runs/quality] [--json FILE]

Each data set is one `panorgan compare`, which resumes: call it again until nothing is missing. `--minutes` ends the
calls in time to collect what is there (finished runs only). Prints, per data set and method, the mean Dice of each
seed, the difference to solo, how much of the gap between solo and central_full is closed, the organ that does worst
against solo in any seed, and the delivered rounds; writes the same as JSON, with NSD, the figures per organ, what is
sent in a round, the size of the model, and seconds per step (to be compared only between runs that were not `shared`:
`--at-once 1 --set training.rounds=3`).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from scipy.stats import wilcoxon

from panorgan import load_experiment
from panorgan.evaluation.comparison import EXTERNAL, FEDERATION, Score, read_scores
from panorgan.evaluation.gap import Share, gain_over
from panorgan.evaluation.metric_means import mean_of
from panorgan.methods.registry import methods as all_methods
from panorgan.workflows.compare import ComparisonPlan, plan_comparison
from panorgan.workflows.compare_costs import measure_costs, patients_of

ROOT = Path(__file__).resolve().parent.parent
ALONE, ALL_LABELS = "solo", "central_full"
# Data sets that lie beside the repository, unless it is said where they are.
os.environ.setdefault("PANORGAN_DATA", str(ROOT.parent / "shared" / "data"))

BUDGET = {
    "training.rounds": 40,
    "training.local_steps": 20,
    "training.validate_every": 10,
    "training.precision": "bfloat16",
    "training.optimizer.learning_rate": 0.002,
    "network.features": [16, 32, 64, 128],
    "splits.seed": 0,
    "local_models": 0,
}
"""The same at every site, for every method; teachers come on top."""


@dataclass(frozen=True)
class DataSet:
    """An experiment file, and what differs from `BUDGET` on it."""

    file: str
    settings: Mapping[str, object]


SETS = {
    "phantom": DataSet("benchmarks/experiments/phantom_three_sites.yaml", {}),
    "chaos": DataSet("examples/chaos.yaml", {"training.sampling.patch_size": [64, 64, 24]}),
    "acdc_2d": DataSet("examples/acdc_2d.yaml", {}),
    "acdc_3d": DataSet("examples/acdc.yaml", {}),
    "hippocampus": DataSet("examples/hippocampus.yaml", {}),
    **{
        f"hard_{sites}": DataSet(f"benchmarks/experiments/phantom_hard_{sites}.yaml", {})
        for sites in ("3", "7", "21", "overlap", "twins")
    },
}


def main() -> None:
    """Run what is missing, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--methods", default="all", help="names, or all registered ones")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end the runs after so long; resumable")
    parser.add_argument("--set", action="append", default=[], help="a setting on top, for a trial at a tiny size")
    parser.add_argument("--runs", type=Path, default=Path("runs/quality"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    methods = sorted(all_methods()) if asked.methods == "all" else asked.methods.split(",")
    methods = [ALONE, *(name for name in methods if name != ALONE)]
    until = time.monotonic() + asked.minutes * 60
    found = {}
    for name in asked.sets.split(","):
        _compare(SETS[name], methods, asked, asked.runs / name, until)
        found[name] = {
            "file": SETS[name].file,
            "set": [*_settings(SETS[name]), *asked.set],
            "methods": collect(asked.runs / name, _plan(SETS[name], methods, asked, asked.runs / name)),
        }
        print(f"\n{name}\n{table(found[name]['methods'])}", flush=True)
    if asked.json:
        result = {"command": "python " + " ".join(sys.argv), "manifest": _manifest(), "sets": found}
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


def _compare(data: DataSet, methods: Sequence[str], asked: argparse.Namespace, folder: Path, until: float) -> None:
    """One `panorgan compare`, ended when the time is up."""
    command = [sys.executable, "-m", "panorgan", "compare", str(ROOT / data.file), "--methods", ",".join(methods)]
    command += ["--seeds", asked.seeds, "--reference", ALONE, "--run", str(folder), "--at-once", str(asked.at_once)]
    command += [word for setting in (*_settings(data), *asked.set) for word in ("--set", setting)]
    left = until - time.monotonic()
    if left <= 0:
        return
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        process.wait(None if math.isinf(left) else left)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def _settings(data: DataSet) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in (BUDGET | dict(data.settings)).items()]


def _plan(data: DataSet, methods: Sequence[str], asked: argparse.Namespace, folder: Path) -> ComparisonPlan:
    """The same comparison, to be read."""
    experiment = load_experiment(ROOT / data.file, [*_settings(data), *asked.set])
    return plan_comparison(experiment, methods, asked.seeds, ALONE, folder)


def collect(folder: Path, plan: ComparisonPlan | None = None) -> dict[str, dict[str, Any]]:
    """Method → seed → mean, organs, NSD, delivered round; and against solo: difference, p, worst organ, gap closed.

    The plan says which cases belong to one patient, what is sent, and how large models are.
    """
    patients = (patients_of(plan) if plan else None) or {}
    scores: dict[str, dict[str, list[Score]]] = {}
    methods: dict[str, dict[str, Any]] = {}
    for metrics in sorted(folder.glob("*/seed-*/metrics.csv")):
        run, seed = metrics.parent, metrics.parent.name.removeprefix("seed-")
        with metrics.open(newline="") as file:
            read = read_scores(csv.DictReader(file), int(seed), lambda site, organ: True, patients)
        scores.setdefault(run.parent.name, {})[seed] = read
        card = json.loads((run / "model" / "model.json").read_text())
        one = methods.setdefault(run.parent.name, {"seeds": {}})
        one["seeds"][seed] = _summary(read) | {"delivered_round": card.get("round")}
    costs = measure_costs(plan) if plan else {}
    for name, method in methods.items():
        method |= against(scores, name) if name != ALONE and ALONE in scores else {}
        if cost := costs.get(name):
            keys = ("bytes_per_round", "parameters", "steps", "step_seconds", "shared")
            method |= {key: getattr(cost, key) for key in keys}
    return methods


def _summary(scores: Sequence[Score]) -> dict[str, Any]:
    """Mean Dice and NSD over organs, of the test cases within the federation; Dice at external sites."""
    inside = [score for score in scores if FEDERATION.holds(score)]
    outside = [score.dice for score in scores if EXTERNAL.holds(score)]
    organs = _organs(inside)
    surface = [mean_of([s for s in inside if s.organ == organ], "nsd").mean for organ in organs]
    return {
        "mean": round(fmean(organs.values()), 4),
        "nsd": round(fmean(surface), 4),
        "organs": {organ: round(value, 4) for organ, value in organs.items()},
    } | ({"external": round(fmean(outside), 4)} if outside else {})


def _organs(scores: Sequence[Score]) -> dict[str, float]:
    """Mean Dice per organ."""
    organs = sorted({score.organ for score in scores})
    return {organ: fmean(score.dice for score in scores if score.organ == organ) for organ in organs}


def against(scores: Mapping[str, Mapping[str, Sequence[Score]]], name: str) -> dict[str, Any]:
    """What a method gains over every site alone, in the seeds that both have."""
    both = sorted(scores[name].keys() & scores[ALONE].keys())
    if not both:
        return {}
    ours, alone = ([score for seed in both for score in scores[method][seed]] for method in (name, ALONE))
    full = [score for seed in both for score in scores.get(ALL_LABELS, {}).get(seed, ())]
    gain = gain_over(ours, alone, full if full and name != ALL_LABELS else None, name=name)
    cells = [_cells(some) for some in (ours, alone)]
    differences = [fmean(cells[0][cell]) - fmean(cells[1][cell]) for cell in sorted(cells[0].keys() & cells[1].keys())]
    means = [
        fmean(_organs([score for score in scores[method][seed] if FEDERATION.holds(score)]).values())
        for method in (name, ALONE)
        for seed in both
    ]
    found = {
        "difference": round(fmean(means[: len(both)]) - fmean(means[len(both) :]), 4),
        "p": float(wilcoxon(differences).pvalue) if any(differences) else 1.0,
    }
    if gain is None:
        return found
    worst = {"organ": gain.worst_organ, "seed": str(gain.organ_seed), "ratio": round(gain.organ_ratio, 4)}
    shares = {"inside": _share(gain.inside), "outside": _share(gain.outside)}
    return found | {"worst_organ": worst, "gap": {place: share for place, share in shares.items() if share}}


def _cells(scores: Sequence[Score]) -> dict[tuple[str, str, str], list[float]]:
    """Dice by organ, site and case: one per seed."""
    cells: dict[tuple[str, str, str], list[float]] = {}
    for score in scores:
        if FEDERATION.holds(score):
            cells.setdefault((score.organ, score.site, score.case), []).append(score.dice)
    return cells


def _share(share: Share | None) -> dict[str, float]:
    """The share of the gap that is closed, and its interval; nothing where there is no gap."""
    if share is None or math.isnan(share.closed):
        return {}
    return {key: round(value, 4) for key, value in asdict(share).items()}


def table(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """A line per method, the best mean first."""
    lines = []
    for name, one in sorted(methods.items(), key=lambda item: -fmean(s["mean"] for s in item[1]["seeds"].values())):
        seeds = " / ".join(f"{seed['mean']:.3f}" for seed in one["seeds"].values())
        rounds = ", ".join(str(seed["delivered_round"]) for seed in one["seeds"].values())
        worst, share = one.get("worst_organ"), one.get("gap", {}).get("inside")
        against_solo = (
            f"{one['difference']:+.3f}  p {one['p']:.3f}  {worst['organ']} {worst['ratio']:.2f}" if worst else ""
        )
        gap = f"gap {share['closed']:.0%} ({share['low']:.0%} to {share['high']:.0%})" if share else ""
        lines.append(f"  {name:16} {seeds:24} {against_solo:52} {gap:28} round {rounds}")
    return "\n".join(lines)


def _manifest() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "machine": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "code": commit.stdout.strip() or "unknown",
    }


if __name__ == "__main__":
    main()
