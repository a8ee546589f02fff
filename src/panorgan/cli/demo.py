"""`panorgan demo`: what a federation brings, in one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from panorgan import Experiment, Run, load_experiment, train, write_report
from panorgan.cli.console import Console
from panorgan.cli.train import in_words
from panorgan.cli.view import watch
from panorgan.evaluation.statistics import organ_site_table

FEDERATED, ALONE, NAIVE = "chorus", "solo", "central_naive"


def demo_experiment(seed: int) -> Experiment:
    """The built-in phantom experiment (the same file as examples/phantom.yaml)."""
    text = (resources.files("panorgan.cli") / "demo.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    return load_experiment(content, {"seed": seed, "phantom.seed": seed})


def run_demo(folder: Path, seed: int, resume: bool, as_json: bool) -> None:
    """Train the federation, every hospital alone and the naive pooling on the same phantoms; print and report them."""
    experiment = demo_experiment(seed)
    owners = {site.name: set(site.annotated) for site in (experiment.phantom.sites if experiment.phantom else ())}
    console = Console(quiet=as_json)
    console.print("Three hospitals label different organs. No image leaves its hospital.", style="bold")
    for name, organs in owners.items():
        console.print(f"  {name:<8}{'labels ' + ', '.join(sorted(organs)) if organs else 'external: never trained on'}")
    rows: dict[str, Sequence[dict[str, Any]]] = {}
    federation = Run(folder / FEDERATED)
    for method in (FEDERATED, ALONE, NAIVE):
        place = federation if method == FEDERATED else federation.baseline(method)
        with watch(f"demo · {method}", as_json) as listener:
            run = train(
                experiment.with_method(method),
                place.path,
                resume,
                (listener,),
                compared_with=None if method == FEDERATED else federation,
            )
        rows[method] = run.scores
    report = write_report(federation)
    comparison = compare(rows, owners)
    if as_json:
        print(json.dumps({"result": comparison, "report": str(report)}), flush=True)
        return
    console.print(_table(comparison, owners))
    for method, words in ((FEDERATED, "Federated model"), (ALONE, "Own models together"), (NAIVE, "Naive pooling")):
        table = organ_site_table(rows[method])
        console.print(f"{words}: mean test Dice {in_words(table.overall)}")
        console.print(f"{'':<{len(words)}}  at the external site {in_words(table.external)}")
    console.print(f"Report: {report}", soft_wrap=True, markup=False, highlight=False)


def compare(rows: dict[str, Sequence[dict[str, Any]]], owners: dict[str, set[str]]) -> dict[str, Any]:
    """Mean Dice per organ and method, at sites that label the organ and at sites that do not."""

    def mean(chosen: Sequence[dict[str, Any]]) -> float | None:
        return sum(row["dice"] for row in chosen) / len(chosen) if chosen else None

    organs = sorted({row["organ"] for some in rows.values() for row in some})
    compared: dict[str, Any] = {}
    for organ in [*organs, "all organs"]:
        compared[organ] = {}
        for method, some in rows.items():
            own = [row for row in some if organ in (row["organ"], "all organs")]
            compared[organ][method] = {
                "labelled_here": mean([row for row in own if row["organ"] in owners.get(row["site"], set())]),
                "not_labelled_here": mean([row for row in own if row["organ"] not in owners.get(row["site"], set())]),
                "all": mean(own),
            }
    return compared


def _table(comparison: dict[str, Any], owners: dict[str, set[str]]) -> Table:
    title = "Test Dice (own: the site labels the organ; other: another does)"
    table = Table(title=title, title_justify="left")
    table.add_column("organ", no_wrap=True)
    table.add_column("by")
    for words, style in (("federated", "bold"), ("alone", ""), ("naive", "")):
        table.add_column(f"{words}\nown", justify="right", style=style)
        table.add_column(f"{words}\nother", justify="right", style=style)
    for organ, scores in comparison.items():
        if organ == "all organs":
            table.add_section()
        labelled_by = ", ".join(site for site, organs in owners.items() if organ in organs)
        cells = []
        for method in (FEDERATED, ALONE, NAIVE):
            for where in ("labelled_here", "not_labelled_here"):
                value = scores[method][where]
                cells.append("–" if value is None else f"{value:.2f}" if value >= 0.5 else f"[red]{value:.2f}[/]")
        table.add_row(organ, labelled_by, *cells)
    return table
