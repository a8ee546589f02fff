"""Write docs/results.md: what was measured with panorgan, from the files in benchmarks/results.

    python benchmarks/results_page.py > docs/results.md

Every comparison and ablation there becomes a section: what it says, its table, the command. Step costs become a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).parent / "results"
TITLES = {
    "flkd_phantom_three_sites_cpu": "FLKD on the phantom",
    "flkd_hippocampus_h200": "FLKD on the hippocampus",
    "segviz_phantom_four_sites_h200": "SegViz on the phantom",
    "ufps_phantom_three_sites_h200": "UFPS on the phantom",
    "ufps_acdc_h200": "UFPS on the heart",
    "ufps_ablation_acdc_h200": "UFPS's modules on the heart",
    "fediod_acdc_h200": "FedIOD on the heart",
}
COSTS = {
    "flkd_local": ("FLKD, local KD", "multi-head FedAvg", "1.52"),
    "flkd_global": ("FLKD, global KD", "multi-head FedAvg", "1.83"),
    "flkd_both": ("FLKD, both", "multi-head FedAvg", "2.23"),
    "ufps": ("UFPS, pseudo labels", "FedAvg", ""),
    "ufps_susam": ("UFPS, sUSAM", "FedAvg", ""),
    "fediod": ("FedIOD", "`multidecoder`", ""),
    "inference_all_organs": ("prediction of seven organs", "of one organ", ""),
}
MACHINES = {  # column → (file, the entries that are looked through, the last one first)
    "H200, bfloat16": ("step_cost_h200.json", ("bfloat16", "graphs")),
    "two CPU cores": ("step_cost_cpu.json", ("float32_ufps", "float32")),
}
OPENING = """# Results

Made by `python benchmarks/results_page.py > docs/results.md` from the files in `benchmarks/results`, which hold every
figure (per organ, site and seed), versions and commit. Budgets are small against the papers' and data sets are others.
So figures cannot be compared with theirs; the order of methods can. The runs drew as many test patients as a run of
today would, but others: splits were shuffled then. Commands are as they were given: below the first three tables,
`multihead` and `segviz` stand for what is `multihead+unlabelled=marginal` and `segviz+unlabelled=marginal` today.

Dice is the mean over organs, test cases and seeds, ± its standard deviation over seeds. *Own* and *other* are organs
that a site labels and does not label itself. p is that of a paired Wilcoxon test against the reference (bold), with
Holm's correction. ASSD is the average symmetric surface distance.
"""


def page() -> str:
    """The whole page."""
    sections = [_section(TITLES.get(path.stem, path.stem), json.loads(path.read_text())) for path in _comparisons()]
    return "\n".join([OPENING, _pays(), _quality(), _holding(), _averaging(), *sections, _costs(), _at_once()])


def _pays() -> str:
    """The federation against every site alone, data set by data set."""
    result = _read("federation_pays_h200")
    rows = [
        [
            name,
            *(_seeds(one["methods"][method]) for method in ("solo", "fedavg")),
            f"{one['difference']:+.3f}",
            _p(one["p"]),
            f"{one['worst_organ']['organ']} {one['worst_organ']['ratio']:.2f}",
        ]
        for name, one in result["sets"].items()
    ]
    table = _table(["", "solo", "fedavg", "difference", "p", "worst organ"], rows)
    return f"## Does a federation pay?\n\n{result['about']}\n\n{table}\n\n```sh\n{result['command']}\n```\n"


def _quality() -> str:
    """Every method against every site alone, as `quality.py` prints it."""
    result = _read("quality_h200")
    parts = ["## Is an organ lost?", result["about"]]
    for name, methods in result["sets"].items():
        best_first = sorted(methods.items(), key=lambda item: -fmean(s["mean"] for s in item[1]["seeds"].values()))
        rows = [[method, *_against_solo(one)] for method, one in best_first]
        parts.append(_table([name, "Dice by seed", "against solo", "p", "worst organ", "delivered"], rows))
    return "\n\n".join([*parts, f"```sh\n{result['command']}\n```\n"])


def _against_solo(one: Mapping[str, Any]) -> list[str]:
    rounds = ", ".join(str(seed["delivered_round"]) for seed in one["seeds"].values())
    if "worst_organ" not in one:
        return [_seeds(one["seeds"]), "", "", "", rounds]
    worst = f"{one['worst_organ']['organ']} {one['worst_organ']['ratio']:.2f}"
    return [_seeds(one["seeds"]), f"{one['difference']:+.3f}", _p(one["p"]), worst, rounds]


def _holding() -> str:
    """What was tried for parts that only owners train, and for FedAvg."""
    result = _read("holding_dev_h200")
    return f"## What keeps organs from getting lost\n\n{result['about']}\n\n{_variants(result['variants'])}\n"


def _averaging() -> str:
    """What averaging was given, and what of it helped: on development scans, and before those existed."""
    result, oldest = _read("averaging_dev_h200"), _read("averaging_h200")
    return "\n\n".join(
        [
            "## What makes averaging sound",
            result["about"],
            _variants(result["variants"]),
            result["more_about"],
            _variants(result["more"]),
            f"<details><summary>What was tried first</summary>\n\n{oldest['about']}",
            _variants(oldest["variants"]),
            f"```sh\n{oldest['command']}\n```\n\n</details>\n",
        ]
    )


def _variants(variants: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A line per variant, a column per data set, its seeds one by one."""
    sets = list(dict.fromkeys(one for found in variants.values() for one in found))
    return _table(
        ["", *sets], [[name, *(_seeds(found.get(one, {})) for one in sets)] for name, found in variants.items()]
    )


def _seeds(runs: Mapping[str, Any]) -> str:
    return " / ".join(f"{run['mean'] if isinstance(run, dict) else run:.3f}" for run in runs.values())


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def _at_once() -> str:
    """Runs side by side on one GPU."""
    result = json.loads((RESULTS / "at_once_h200.json").read_text())
    one = result["steps_per_second"]["one run"]
    rows = [[name, f"{rate:.0f}", f"{rate / one:.1f}"] for name, rate in result["steps_per_second"].items()]
    table = _table(["", "steps a second", "relative to one run"], rows)
    return f"## Runs at once\n\n{result['about']}\n\n{table}\n\n```sh\n{result['command']}\n```\n"


def _comparisons() -> list[Path]:
    """In the order of the titles; files without one come last."""
    found = [path for path in sorted(RESULTS.glob("*.json")) if "comparison" in json.loads(path.read_text())]
    order = list(TITLES)
    return sorted(found, key=lambda path: order.index(path.stem) if path.stem in order else len(order))


def _section(title: str, result: Mapping[str, Any]) -> str:
    comparison = result["comparison"]
    rows = [_row(comparison, method) for method in comparison["methods"]]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    table = _table(columns, [[row[name] for name in columns] for row in rows])
    if result.get("by_organ"):
        table = f"{table}\n\n{_by_organ(comparison)}"
    machine = result["manifest"]["machine"].split(";")[0].split(",")[0]
    seeds = len(comparison["seeds"])
    return (
        f"## {title}\n\n{result['about']}\n\n{table}\n\n{seeds} seeds, {machine}:\n\n```sh\n{result['command']}\n```\n"
    )


def _by_organ(comparison: Mapping[str, Any]) -> str:
    """Dice in percent and surface distance of every organ, then their mean, as papers on the heart show them."""
    organs = list(dict.fromkeys(f["organ"] for f in comparison["figures"] if f["organ"] != "all"))
    short = [*(organ.removeprefix("heart_").replace("_", " ") for organ in organs), "mean"]
    rows = []
    for method in comparison["methods"]:
        every = [
            (_figure(comparison, kind, method, "federation", organ).get("mean"), factor)
            for kind, factor in (("figures", 100), ("distances", 1))
            for organ in (*organs, "all")
        ]
        rows.append([method, *(_number(None if mean is None else mean * factor, 2) for mean, factor in every)])
    return _table(["method", *(f"Dice %, {name}" for name in short), *(f"ASSD mm, {name}" for name in short)], rows)


def _figure(comparison: Mapping[str, Any], kind: str, method: str, place: str, organ: str = "all") -> Mapping[str, Any]:
    wanted = (method, organ, place)
    found = (f for f in comparison.get(kind, ()) if (f["method"], f["organ"], f["place"]) == wanted)
    return next(found, {})


def _row(comparison: Mapping[str, Any], method: str) -> dict[str, str]:
    def figure(kind: str, place: str) -> Mapping[str, Any]:
        return _figure(comparison, kind, method, place)

    federation, distance = figure("figures", "federation"), figure("distances", "federation")
    papers = {row["label"]: row["paper"] for row in comparison.get("ablation", {}).get("rows", ())}
    missed = f" ({distance['missed']} missed)" if distance.get("missed") else ""
    spread = f" ± {federation['sd']:.3f}" if federation.get("sd") is not None else ""  # one seed has none
    return {
        "method": f"**{method}**" if method == comparison["reference"] else method,
        "Dice": _number(federation.get("mean")) + spread,
        "own": _number(figure("figures", "labelled").get("mean")),
        "other": _number(figure("figures", "not_labelled").get("mean")),
        "external": _number(figure("figures", "external").get("mean")),
        "p": _p(federation.get("p_holm")),
        "ASSD, mm": (_number(distance.get("mean"), 2) + missed).strip(),
        "paper, %": papers.get(method, ""),
    }


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _costs() -> str:
    measured = {column: dict(_entries(*where)) for column, where in MACHINES.items()}
    rows = [
        [name, reference, *(f"{found[label]:.2f}" if label in found else "" for found in measured.values()), paper]
        for label, (name, reference, paper) in COSTS.items()
        if any(label in found for found in measured.values())
    ]
    about = "\n\n".join(
        f"{column}: {json.loads((RESULTS / file).read_text())['about']}" for column, (file, _) in MACHINES.items()
    )
    table = _table(["step of", "relative to", *MACHINES, "paper"], rows)
    return f"## What a training step costs\n\n{table}\n\n{about}\n\n```sh\npython benchmarks/step_cost.py --json\n```\n"


def _entries(file: str, names: Sequence[str]) -> Iterator[tuple[str, float]]:
    content = json.loads((RESULTS / file).read_text())
    for name in names:
        yield from content[name].items()


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(page(), end="")
