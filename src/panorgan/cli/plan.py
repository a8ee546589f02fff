"""`panorgan plan`: the sites' measurements, and the plan that follows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from panorgan import load_experiment
from panorgan.cli.console import Console
from panorgan.cli.view import watch
from panorgan.federation.events import EventLog
from panorgan.preparation.plan import MEASURABLE, Plan, proposed_patch
from panorgan.preparation.sampling import sliced_axis
from panorgan.preparation.site_statistics import SiteStatistics
from panorgan.workflows.prepare import make_plan
from panorgan.workflows.site_cases import cache_folder, read_sites


def show_plan(path: Path, overrides: Sequence[str], as_json: bool) -> None:
    """Print the measurements, the plan, and the lines for the experiment file."""
    experiment = load_experiment(path, overrides)
    with watch(f"{experiment.name} · plan", as_json) as listener:
        log = EventLog(None, (listener,))
        plan, sites = make_plan(
            experiment,
            on_progress=lambda what, done, total: log.transient("prepare", what=what, done=done, total=total),
        )
    read = read_sites(experiment, cache_folder(), lambda what, done, total: None)
    sizes = {site.name: site.sizes() for site in read}
    sliced = sliced_axis(experiment.training.sampling.patch_size)
    patch = proposed_patch(plan, sites, experiment.network.divisor, sliced)
    if as_json:
        numbers = {name: site.as_numbers() for name, site in sites.items()}
        result = {"plan": plan.as_json(), "patch_size": patch, "sites": numbers, "patients": sizes}
        print(json.dumps({"result": result}), flush=True)
        return
    console = Console(highlight=False)
    console.print(_table(sites, sizes))
    console.print("[bold]The plan for every site.[/] For the experiment file, instead of its 'plan':")
    console.print(_yaml(plan), markup=False, soft_wrap=True)
    now = list(experiment.training.sampling.patch_size)
    console.print(f"[bold]A patch that suits it:[/] {list(patch)} (training.sampling.patch_size, now {now}).")


def _table(sites: Mapping[str, SiteStatistics], sizes: Mapping[str, Mapping[str, int]]) -> Table:
    table = Table(title="What the sites measure (numbers only, training cases)", title_justify="left")
    patients = "patients: train, validation, test"
    for name in ("site", patients, "cases", "CT", "median voxel, mm", "median extent, mm", "annotated tissue, HU"):
        table.add_column(name, justify="left" if name == "site" else "right")
    for name, site in sites.items():
        voxel, extent = (" × ".join(f"{mm:.3g}" for mm in sizes) for sizes in (site.spacing_mm, site.extent_mm))
        ranges = site.hu_ranges.values()
        tissue = f"{min(r[0] for r in ranges):.0f} to {max(r[1] for r in ranges):.0f}" if ranges else "–"
        shares = ", ".join(str(count) for count in sizes[name].values())
        table.add_row(name, shares, str(site.cases), str(site.ct_cases), voxel, extent, tissue)
    return table


def _yaml(plan: Plan) -> str:
    """Ready to paste."""
    spacing = ", ".join(f"{mm:g}" for mm in plan.spacing_mm)
    lines = ["plan:", f"  spacing_mm: [{spacing}]", f"  intensity: {plan.intensity}"]
    if plan.intensity == "window":
        lines.append(f"  window_hu: [{plan.window_hu[0]:g}, {plan.window_hu[1]:g}]")
    chosen = plan.model_dump(exclude=set(MEASURABLE), exclude_defaults=True)
    return "\n".join([*lines, *(f"  {name}: {value}" for name, value in chosen.items())])
