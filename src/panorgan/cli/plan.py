"""`panorgan plan`: the sites' measurements, the plan that follows, and settings that suit this machine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from panorgan import Experiment, load_experiment
from panorgan.cli.console import Console, say
from panorgan.cli.estimate_words import in_words, is_usual, proposal_lines, span
from panorgan.cli.view import watch
from panorgan.errors import ConfigError
from panorgan.federation.events import EventLog
from panorgan.federation.files import write_atomically
from panorgan.overrides import overridden
from panorgan.preparation.plan import MEASURABLE, Plan
from panorgan.preparation.site_statistics import SiteStatistics, pooled_extent
from panorgan.workflows.device import use_hardware
from panorgan.workflows.fill_in import filled_in, is_set
from panorgan.workflows.machine_size import DEFAULT_MINUTES, Data, Proposal, propose
from panorgan.workflows.patch_size import CODE, oversized_patch
from panorgan.workflows.prepare import make_plan
from panorgan.workflows.site_cases import SiteCases, cache_folder, facts_of, read_sites
from panorgan.yaml_files import read_yaml


@dataclass(frozen=True)
class PlanRequest:
    """The options of the command line. `write`: fill in the file; `write_to`: a new file with everything proposed."""

    path: Path
    overrides: Sequence[str] = field(default=())
    minutes: float | None = None
    write: bool = False
    write_to: Path | None = None
    as_json: bool = False


def show_plan(request: PlanRequest) -> None:
    """Print the measurements, the plan, and the settings; write them where asked to."""
    _check_target(request.path, request.write_to)
    content = overridden(read_yaml(request.path, "experiment file"), request.overrides)
    experiment = load_experiment(request.path, request.overrides)
    with watch(f"{experiment.name} · plan", request.as_json) as listener:
        log = EventLog(None, (listener,))
        plan, sites = make_plan(
            experiment,
            on_progress=lambda what, done, total: log.transient("prepare", what=what, done=done, total=total),
        )
        log.transient("prepare", what="timing steps", done=0, total=1)
        read = read_sites(experiment, cache_folder(), lambda what, done, total: None)
        everything = request.write_to is not None
        proposal = propose(
            experiment,
            lambda name: not everything and is_set(content, name),
            data_of(experiment, plan, sites, read),
            use_hardware(experiment.hardware),
            DEFAULT_MINUTES if request.minutes is None else request.minutes,
        )
        log.transient("prepare", what="timing steps", done=1, total=1)
    sizes = {site.name: site.sizes() for site in read}
    patch = proposal.settings.get("training.sampling.patch_size", experiment.training.sampling.patch_size)
    too_large = oversized_patch(patch, data_of(experiment, plan, sites, read).shape)
    written = _write(request, plan, content, proposal)
    if request.as_json:
        notices = [{"code": CODE, "text": too_large}] if too_large else []
        _print_json(plan, sites, sizes, proposal, experiment, written, notices)
        return
    console = Console(highlight=False)
    console.print(_table(sites, sizes))
    use = "" if written else " To use it, replace 'plan' in the experiment file with:"
    console.print(f"[bold]Plan for all sites.[/]{use}")
    console.print(_yaml(plan), markup=False, soft_wrap=True)
    _show_proposal(console, proposal, request.minutes)
    if too_large:
        console.print(f"{too_large} \\[{CODE}]", style="yellow", soft_wrap=True)
    if written:
        say(f"Written: {written}")
    elif proposal.settings:
        say(f"'panorgan plan {request.path} --write' adds to the file what it does not set yet.")
    say(f"Next: panorgan train {shlex.quote(str(written or request.path))}")


def data_of(
    experiment: Experiment, plan: Plan, statistics: Mapping[str, SiteStatistics], read: Sequence[SiteCases]
) -> Data:
    """What the proposal needs to know of the data."""
    extent = pooled_extent(statistics)
    shape = tuple(mm / size for mm, size in zip(extent, plan.spacing_mm, strict=True))
    training = {site.name: facts_of(site) for site in read if not site.external}
    validation = sum(len(site.validation) for site in read)
    return Data((shape[0], shape[1], shape[2]), plan.spacing_mm, training, validation, sum(len(s.test) for s in read))


def _show_proposal(console: Console, proposal: Proposal, minutes: float | None) -> None:
    lines = list(proposal_lines(proposal.settings))
    if lines:
        console.print("[bold]Settings that suit this machine[/] (settings of the file are kept):")
    else:
        say("The file sets network, patch, batch and rounds already; --write-to NEW.yaml proposes all of them.")
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    free = "" if proposal.available is None else f" of {proposal.available / 1e9:.1f} GB free"
    limit = "" if minutes is None else f" (budget: {span(minutes * 60)})"
    console.print(
        f"On {proposal.device}: {in_words(proposal.estimate.as_json())}{limit}.", markup=False, soft_wrap=True
    )
    console.print(f"Memory: about {proposal.memory / 1e9:.1f} GB{free}.", markup=False)
    for note in proposal.notes:
        console.print(note, markup=False, soft_wrap=True)


def _write(request: PlanRequest, plan: Plan, content: Mapping[str, Any], proposal: Proposal) -> Path | None:
    """Write the proposal; a file's own values stay, but in a new file that the user asked for."""
    target = request.write_to or (request.path if request.write else None)
    if target is None:
        return None
    measured = {f"plan.{name}": plan.as_json()[name] for name in MEASURABLE}
    if plan.intensity != "window":
        del measured["plan.window_hu"]
    everything = request.write_to is not None
    wanted = {k: v for k, v in measured.items() if everything or not is_set(content, k)} | dict(proposal.settings)
    settings = {k: v for k, v in wanted.items() if is_set(content, k) or not is_usual(k, v)}
    text = request.path.read_text(encoding="utf-8")
    changed = filled_in(text, settings, request.path)
    write_atomically(target, changed)
    load_experiment(target, request.overrides)  # it must be usable
    return target


def _check_target(path: Path, target: Path | None) -> None:
    """A new file replaces none, and stands next to the old one: relative folders would lead elsewhere."""
    if target is not None and target.exists():
        raise ConfigError(
            "The new file exists already.",
            code="plan-file-exists",
            where=str(target),
            fix="Choose another name, or fill in the existing file with --write.",
        )
    if target is not None and path.parent.resolve() != target.parent.resolve():
        raise ConfigError(
            "Write the new file to the folder of the old one.",
            code="written-elsewhere",
            where=str(target),
            why="folders in an experiment file are relative to it",
            fix=f"Use a name in {path.parent}.",
        )


def _print_json(
    plan: Plan,
    sites: Mapping[str, SiteStatistics],
    sizes: Mapping[str, Mapping[str, int]],
    proposal: Proposal,
    experiment: Experiment,
    written: Path | None,
    notices: Sequence[Mapping[str, str]],
) -> None:
    sampling = experiment.training.sampling
    result = {
        "plan": plan.as_json(),
        "patch_size": proposal.settings.get("training.sampling.patch_size", list(sampling.patch_size)),
        "sites": {name: site.as_numbers() for name, site in sites.items()},
        "patients": sizes,
        "settings": dict(proposal.settings),
        "estimate": proposal.estimate.as_json(),
        "memory_bytes": round(proposal.memory),
        "memory_free": proposal.available,
        "device": proposal.device,
        "minutes": proposal.minutes,
        "fits": proposal.fits,
        "notes": list(proposal.notes),
        "notices": list(notices),
        "written": None if written is None else str(written),
    }
    print(json.dumps({"result": result}), flush=True)


def _table(sites: Mapping[str, SiteStatistics], sizes: Mapping[str, Mapping[str, int]]) -> Table:
    table = Table(title="Measurements of the sites (numbers only, training cases)", title_justify="left")
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
