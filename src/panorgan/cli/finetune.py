"""`panorgan finetune`: a delivered model, trained on with one site's own cases."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from panorgan import Experiment, Run, train, write_report
from panorgan.cli.console import Console, say
from panorgan.cli.view import watch
from panorgan.deployment.finetune import of_kit
from panorgan.deployment.folders import SiteKit
from panorgan.errors import ConfigError
from panorgan.workflows.finetune import of_run, score_start
from panorgan.workflows.tables import Row


@dataclass(frozen=True)
class FinetuneRequest:
    """The options of the command line."""

    source: Path
    site: str | None = None
    run: Path | None = None
    overrides: Sequence[str] = field(default=())
    resume: bool = False
    as_json: bool = False


def run_finetune(request: FinetuneRequest) -> None:
    """Train, and show the site's scores before and after."""
    experiment, place = _experiment(request)
    organs = ", ".join(experiment.vocabulary).replace("_", " ")
    if not request.as_json:
        say(f"Fine-tuning {organs} with the cases of {next(iter(experiment.sites))}; the original model is kept.")
    with watch(experiment.name, request.as_json) as listener:
        run = train(experiment, place, request.resume, (listener,), estimate=True)
    before, after = _means(score_start(run)), _means(run.scores)
    report = write_report(run)
    if request.as_json:
        result = {"run": str(run.path), "report": str(report), "dice_before": before, "dice_after": after}
        print(json.dumps({"result": result}), flush=True)
        return
    table = Table("organ", "before", "after", title="Dice on the site's test cases", title_justify="left")
    for organ in run.organs:
        table.add_row(organ, *(f"{means[organ]:.3f}" if organ in means else "–" for means in (before, after)))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"Model: {run.model_folder}\nReport: {report}", markup=False)


def _experiment(request: FinetuneRequest) -> tuple[Experiment, Path]:
    """The experiment and its run folder; at a hospital the model stays in the kit."""
    kit = SiteKit(request.source.expanduser().resolve())
    if not kit.settings.is_file():
        experiment = of_run(Run(request.source), request.site, request.overrides)
        return experiment, request.run or Path("runs") / experiment.name
    if request.site is not None:
        raise ConfigError(
            "A kit has one site.",
            code="site-of-a-kit",
            where="--site",
            fix="Leave --site out.",
        )
    return of_kit(kit, request.overrides), request.run or kit.path / "finetuned"


def _means(rows: Sequence[Row]) -> dict[str, float]:
    """Mean Dice by organ; absent organs are left out."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if not math.isnan(float(row["dice"])):
            found.setdefault(str(row["organ"]), []).append(float(row["dice"]))
    return {organ: sum(values) / len(values) for organ, values in sorted(found.items())}
