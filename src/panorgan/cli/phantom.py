"""`panorgan phantom`: generated hospitals as ordinary data folders, for trials without real data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from panorgan.cli.console import Console
from panorgan.cli.doctor import reading
from panorgan.config import load_experiment, parse_experiment
from panorgan.errors import ConfigError
from panorgan.federation.files import write_atomically
from panorgan.phantom import PhantomConfig, withheld_folder, write_federation
from panorgan.workflows.parallel import usable_cores
from panorgan.yaml_files import read_yaml

EXPERIMENT = "experiment.yaml"


def write_hospitals(folder: Path, experiment: Path | None, as_json: bool) -> None:
    """Write a data folder per site, the withheld labels separately, and an experiment file that names them."""
    folder = folder.expanduser().resolve()
    content, config = _described(experiment)
    with reading() as show:
        sites = write_federation(
            config,
            folder,
            on_case=lambda case, done, total: show("generating phantoms", done, total),
            workers=usable_cores(),
            plain=True,
        )
    kept = (folder / EXPERIMENT).exists()
    if not kept:
        write_atomically(folder / EXPERIMENT, experiment_text(content, config, folder, sites))
    if as_json:
        folders = {name: str(path) for name, path in sites.items()}
        print(json.dumps({"folder": str(folder), "sites": folders, "experiment": str(folder / EXPERIMENT)}), flush=True)
        return
    _show(Console(highlight=False), config, folder, sites, kept)


def _described(path: Path | None) -> tuple[dict[str, Any], PhantomConfig]:
    """The experiment as plain data, and its hospitals; the demo's by default."""
    if path is None:
        text = (resources.files("panorgan.cli") / "demo.yaml").read_text(encoding="utf-8")
        content: dict[str, Any] = yaml.safe_load(text)
        config = parse_experiment(content, "demo").phantom
    else:
        content, config = read_yaml(path, "experiment file"), load_experiment(path).phantom
    if config is None:
        raise ConfigError(
            "This experiment has no generated hospitals.",
            code="no-phantom",
            where=str(path),
            why="it names folders under 'sites', and nothing under 'phantom'",
            fix="Give a file with 'phantom: {}' in it, or omit --experiment for the built-in hospitals.",
        )
    return content, config


def experiment_text(content: Mapping[str, Any], config: PhantomConfig, folder: Path, sites: Mapping[str, Path]) -> str:
    """The experiment with the written folders instead of `phantom`; paths are relative to the file."""
    places: dict[str, Any] = {}
    for site in config.sites:
        places[site.name] = {
            "folder": str(sites[site.name].relative_to(folder)),
            "withheld": str(withheld_folder(folder, site.name).relative_to(folder)),
            **({"external": True} if site.external else {}),
            **({"joins_at": site.joins_at} if site.joins_at else {}),
        }
    rest = {key: value for key, value in content.items() if key not in ("phantom", "sites")}
    # The vocabulary is what the phantom draws, also where the file does not state it.
    whole = {"name": "phantom", "vocabulary": list(config.organs), **rest, "sites": places}
    return (
        "# Generated hospitals. 'withheld' labels score a simulation; no hospital has them, and none is trained on.\n"
        "# Simulate:  panorgan train experiment.yaml        Between machines: 'sites' is left out, each has its own.\n"
        + yaml.safe_dump(whole, sort_keys=False, default_flow_style=None, width=110)
    )


def _show(console: Console, config: PhantomConfig, folder: Path, sites: Mapping[str, Path], kept: bool) -> None:
    table = Table.grid(padding=(0, 2))
    for site in config.sites:
        what = "external: no labels" if site.external else "labels " + ", ".join(site.annotated)
        table.add_row(f"  {sites[site.name].name}", f"{site.cases} scans", what)
    console.print(f"Generated hospitals in {folder}:", soft_wrap=True, markup=False)
    console.print(table)
    console.print("  withheld/  all labels of all scans, for scoring only")
    words = "unchanged" if kept else "what to train, on these folders"
    console.print(f"  {EXPERIMENT}  {words}")
    console.print(f"Simulate a federation:  panorgan train {folder / EXPERIMENT}", soft_wrap=True, markup=False)
    console.print("Run a real one, between these folders:  panorgan federation init --example")
