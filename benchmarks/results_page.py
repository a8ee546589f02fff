"""Write docs/results.md: what was measured with panorgan, from the files in benchmarks/results.

    python benchmarks/results_page.py > docs/results.md

Every comparison and ablation there becomes a section: what it says, its table, the command. Step costs become a table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from results_methods import table_of_methods
from results_overview import RESULTS, markdown_table, overview, read, step_costs

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
SUMMARIES = {  # of folded sections, in a line or two; other sections make theirs from the figures
    "quality": (
        "On CHAOS none of nine methods loses an organ any more: at least 0.89 of that organ alone. Only pseudo labels "
        "are ahead of solo."
    ),
    "chorus": (
        "chorus closes 58 % of the gap between alone and all labels on the harder phantom (FedAvg 25 %); on ACDC it is "
        "no better than FedAvg (46 % in 3D, 21 % slice by slice; FedAvg 45 and 28 %)."
    ),
    "pieces": (
        "Without pieces far from an organ FedAvg closes 65 % instead of 30 % of the gap on CHAOS, chorus 74 % instead "
        "of 47 % (one seed, small)."
    ),
    "holding": (
        "Holding the outputs of the other sites' parts keeps organs. Holding features, averaging second moments, "
        "sharpening shares and means over rounds bring nothing."
    ),
    "averaging": (
        "The received model's shares bring FedAvg up to pooled training. Longer server steps, FedExP's step, owners' "
        "rows and the prior bring nothing on top."
    ),
    "flkd_phantom_three_sites_cpu": (
        "FLKD has 0.834, FedAvg with the same network 0.748 (p below 0.001), for half as many steps again."
    ),
    "flkd_hippocampus_h200": (
        "FLKD is steady where FedAvg with the same network is not; FedAvg with one softmax does as well."
    ),
    "segviz_phantom_four_sites_h200": (
        "SegViz is better than conventional FedAvg at the external site (0.917, 0.910), not inside; the paper's 73 "
        "against 65 is not reproduced."
    ),
    "ufps_phantom_three_sites_h200": (
        "Pseudo labels help a little (0.900; alone 0.898), UFPS's modules do not (0.897)."
    ),
    "ufps_acdc_h200": (
        "Pseudo labels help much (0.756; alone 0.713), UFPS's modules do not on top (0.745), though surfaces lie "
        "nearer."
    ),
    "ufps_ablation_acdc_h200": (
        "GMT +0.014, sUSAM +0.009, the others next to nothing, none of it significant; the paper's order is not "
        "reproduced but for GMT."
    ),
    "fediod_acdc_h200": (
        "FLKD (0.852) and UFPS (0.849) come nearest to central_full (0.883). FedIOD has 0.770, less than its own "
        "network without its modules (0.842); much of that is the learning rate."
    ),
}
OPENING = """# Results

Made by `python benchmarks/results_page.py > docs/results.md` from the files in `benchmarks/results`, which hold every
figure (per organ, site and seed), versions and commit. Budgets are small against the papers' and data sets are others.
So figures cannot be compared with theirs; the order of methods can.

## All methods on all data sets

Mean test Dice over organs, cases and seeds; below it how much of the gap between `solo` and `central_full` is closed,
and the organ with the lowest Dice. **Compare within a row only**: a row is one comparison, with the same scans, splits
and steps at each site for all. Bold: best of the methods that pool no data. What was not run is empty.
"""
DETAILS = """
† Code in which FedAvg and FedProx had the marginal loss, AdamW began anew in every round, and SegViz was as published.
Test patients are as many as today's, but others: splits were shuffled then.
‡ No figures per organ were kept, and seeds differ: the section below compares seed by seed.
*A part per organ*: FedAvg of a network with a head or task block for each organ, all averaged over all sites. Teachers
of `fedavg_pl`, `ufps` and `flkd` train on top of the rounds.

Below is everything that was measured, section by section. Dice is the mean over organs, test cases and seeds, ± its
standard deviation over seeds. *Own* and *other* are organs that a site labels and does not label itself. p is that of a
paired Wilcoxon test against the reference (bold), with Holm's correction. ASSD is the average symmetric surface
distance. Commands are as they were given: from FLKD on the phantom on, `multihead` and `segviz` stand for what is
`multihead+unlabelled=marginal` and `segviz+unlabelled=marginal` today.
"""


def page() -> str:
    """The whole page."""
    sections = [_section(path.stem, json.loads(path.read_text())) for path in _comparisons()]
    first = [OPENING, overview(), DETAILS]
    return "\n".join(
        [
            *first,
            *_methods(),
            _pays(),
            _quality(),
            _pieces(),
            _chorus(),
            _holding(),
            _averaging(),
            *sections,
            _costs(),
            _at_once(),
        ]
    )


def _methods() -> list[str]:
    """Every registered method on several data sets, once that has been run."""
    if not (RESULTS / "methods_h200.json").is_file():
        return []
    result = read("methods_h200")
    table = table_of_methods(result["sets"], result.get("step_costs", {}))
    content = f"{result['about']}\n\n{table}\n\n```sh\n{result['command']}\n```"
    return [_folded("Every method", result["summary"], content)]


def _folded(title: str, summary: str, content: str) -> str:
    """A heading that can be linked to, one line, and the rest to be opened."""
    return f"## {title}\n\n<details><summary>{summary}</summary>\n\n{content}\n\n</details>\n"


def _pays() -> str:
    """The federation against every site alone, data set by data set."""
    result = read("federation_pays_h200")
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
    table = markdown_table(["", "solo", "fedavg", "difference", "p", "worst organ"], rows)
    gains = "; ".join(f"{name} {one['difference']:+.3f}" for name, one in result["sets"].items())
    content = f"{result['about']}\n\n{table}\n\n```sh\n{result['command']}\n```"
    return _folded("Does a federation pay?", f"FedAvg against every site alone: {gains}.", content)


def _quality() -> str:
    """Every method against every site alone, as `quality.py` prints it."""
    result = read("quality_h200")
    parts = [result["about"]]
    for name, methods in result["sets"].items():
        best_first = sorted(methods.items(), key=lambda item: -fmean(s["mean"] for s in item[1]["seeds"].values()))
        rows = [[method, *_against_solo(one)] for method, one in best_first]
        parts.append(markdown_table([name, "Dice by seed", "against solo", "p", "worst organ", "delivered"], rows))
    content = "\n\n".join([*parts, f"```sh\n{result['command']}\n```"])
    return _folded("Is an organ lost?", SUMMARIES["quality"], content)


def _against_solo(one: Mapping[str, Any]) -> list[str]:
    rounds = ", ".join(str(seed["delivered_round"]) for seed in one["seeds"].values())
    if "worst_organ" not in one:
        return [_seeds(one["seeds"]), "", "", "", rounds]
    worst = f"{one['worst_organ']['organ']} {one['worst_organ']['ratio']:.2f}"
    return [_seeds(one["seeds"]), f"{one['difference']:+.3f}", _p(one["p"]), worst, rounds]


def _holding() -> str:
    """What was tried for parts that only owners train, and for FedAvg."""
    result = read("holding_dev_h200")
    content = f"{result['about']}\n\n{_variants(result['variants'])}"
    return _folded("What keeps organs from getting lost", SUMMARIES["holding"], content)


def _pieces() -> str:
    """What pieces far from an organ cost, and what removes them."""
    result = read("pieces_dev_cpu")
    content = f"{result['about']}\n\n{_variants(result['variants'])}\n\n```sh\n{result['command']}\n```"
    return _folded("Stray pieces", SUMMARIES["pieces"], content)


def _chorus() -> str:
    """chorus against solo, FedAvg and all labels; what it was made of; what went wrong first."""
    result, tried, oldest = read("chorus_h200"), read("chorus_dev_h200"), read("chorus_demo_cpu")
    rows = [
        [name, method, *_against_solo(one), _gap_closed(methods["methods"], method)]
        for name, methods in result["sets"].items()
        for method, one in methods["methods"].items()
    ]
    header = ["", "method", "Dice by seed", "against solo", "p", "worst organ", "delivered", "gap closed"]
    content = "\n\n".join(
        [
            f"{result['about']}\n\n{markdown_table(header, rows)}\n\n```sh\n{result['command']}\n```",
            f"**What it was made of.** {tried['about']}",
            *(_variants(tried[part]) for part in ("bounds", "variants", "second")),
            f"**First runs.** {oldest['about']}\n\n{_variants(oldest['variants'])}\n\n```sh\n{oldest['command']}\n```",
        ]
    )
    return _folded("chorus", SUMMARIES["chorus"], content)


def _gap_closed(methods: Mapping[str, Any], method: str) -> str:
    """(method − solo) / (central_full − solo), of the means over seeds."""
    means = {name: fmean(seed["mean"] for seed in one["seeds"].values()) for name, one in methods.items()}
    if method in ("solo", "central_full"):
        return ""
    return f"{(means[method] - means['solo']) / (means['central_full'] - means['solo']):.0%}"


def _averaging() -> str:
    """What averaging was given, and what of it helped: on development scans, and before those existed."""
    result, oldest = read("averaging_dev_h200"), read("averaging_h200")
    content = "\n\n".join(
        [
            result["about"],
            _variants(result["variants"]),
            result["more_about"],
            _variants(result["more"]),
            f"**What was tried first.** {oldest['about']}",
            _variants(oldest["variants"]),
            f"```sh\n{oldest['command']}\n```",
        ]
    )
    return _folded("What makes averaging sound", SUMMARIES["averaging"], content)


def _variants(variants: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A line per variant, a column per data set, its seeds one by one."""
    sets = list(dict.fromkeys(one for found in variants.values() for one in found))
    return markdown_table(
        ["", *sets], [[name, *(_seeds(found.get(one, {})) for one in sets)] for name, found in variants.items()]
    )


def _seeds(runs: Mapping[str, Any]) -> str:
    return " / ".join(f"{run['mean'] if isinstance(run, dict) else run:.3f}" for run in runs.values())


def _at_once() -> str:
    """Runs side by side on one GPU."""
    result = json.loads((RESULTS / "at_once_h200.json").read_text())
    one = result["steps_per_second"]["one run"]
    rows = [[name, f"{rate:.0f}", f"{rate / one:.1f}"] for name, rate in result["steps_per_second"].items()]
    table = markdown_table(["", "steps a second", "relative to one run"], rows)
    content = f"{result['about']}\n\n{table}\n\n```sh\n{result['command']}\n```"
    best = max(result["steps_per_second"], key=lambda name: result["steps_per_second"][name])
    summary = f"{best[0].upper()}{best[1:]} do {result['steps_per_second'][best] / one:.1f} times the steps of one."
    return _folded("Runs at once", summary, content)


def _comparisons() -> list[Path]:
    """In the order of the titles; files without one come last."""
    found = [path for path in sorted(RESULTS.glob("*.json")) if "comparison" in json.loads(path.read_text())]
    order = list(TITLES)
    return sorted(found, key=lambda path: order.index(path.stem) if path.stem in order else len(order))


def _section(name: str, result: Mapping[str, Any]) -> str:
    comparison = result["comparison"]
    rows = [_row(comparison, method) for method in comparison["methods"]]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    table = markdown_table(columns, [[row[name] for name in columns] for row in rows])
    if result.get("by_organ"):
        table = f"{table}\n\n{_by_organ(comparison)}"
    machine = result["manifest"]["machine"].split(";")[0].split(",")[0]
    seeds = len(comparison["seeds"])
    content = f"{result['about']}\n\n{table}\n\n{seeds} seeds, {machine}:\n\n```sh\n{result['command']}\n```"
    return _folded(
        TITLES.get(name, name), SUMMARIES.get(name, f"{', '.join(comparison['methods'])}; {seeds} seeds."), content
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
    return markdown_table(
        ["method", *(f"Dice %, {name}" for name in short), *(f"ASSD mm, {name}" for name in short)], rows
    )


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
    measured = {column: step_costs(*where) for column, where in MACHINES.items()}
    rows = [
        [name, reference, *(f"{found[label]:.2f}" if label in found else "" for found in measured.values()), paper]
        for label, (name, reference, paper) in COSTS.items()
        if any(label in found for found in measured.values())
    ]
    about = "\n\n".join(
        f"{column}: {json.loads((RESULTS / file).read_text())['about']}" for column, (file, _) in MACHINES.items()
    )
    table = markdown_table(["step of", "relative to", *MACHINES, "paper"], rows)
    content = f"{table}\n\n{about}\n\n```sh\npython benchmarks/step_cost.py --json\n```"
    said = ", ".join(f"{name} {value} × {reference}" for name, reference, value, *_ in rows if value)
    return _folded("What a training step costs", f"On an H200: {said}.", content)


if __name__ == "__main__":
    print(page(), end="")
