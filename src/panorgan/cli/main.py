"""The `panorgan` command. Heavy imports wait until a command needs them, so that `--help` is quick."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import panorgan
from panorgan.cli.listing import print_methods, print_organs
from panorgan.errors import PanorganError

# On a shared machine, CPU threads that spin long while they wait slow each other down many times over. A short spin
# costs nothing. This must be said before torch is imported; what the user has set stays.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

app = typer.Typer(
    name="panorgan",
    help="Hospitals that each label different organs train one model that segments them all.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output: one JSON object per line.")]
RunPath = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]


def main() -> None:
    """Run the command line; our own errors become a message and an exit code."""
    try:
        app()
    except PanorganError as error:
        _show_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        Console(stderr=True).print("Stopped. A training run can be continued with --resume.")
        sys.exit(130)


def _show_error(error: PanorganError) -> None:
    if "--json" in sys.argv:
        print(json.dumps({"error": error.what, **dict(error.details())}), flush=True)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]Error:[/] {_plain(error.what)}")
    for label, text in error.details():
        console.print(f"  [bold]{label + ':':<7}[/]{_plain(text)}")


def _plain(text: str) -> str:
    """Square brackets of a message are not markup."""
    return text.replace("[", r"\[")


@app.callback(invoke_without_command=True)
def _common(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        typer.echo(f"panorgan {panorgan.__version__}")
        raise typer.Exit


@app.command()
def demo(
    run: Annotated[Path, typer.Option(help="Folder for the two runs.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Another seed, other phantoms.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted demo.")] = False,
    as_json: AsJson = False,
) -> None:
    """Three generated hospitals, different labels: train a federation, and what goes wrong without one."""
    from panorgan.cli.demo import run_demo

    run_demo(run, seed, resume, as_json)


@app.command()
def train(
    experiment: Annotated[Path, typer.Argument(help="The experiment file.", metavar="EXPERIMENT.yaml")],
    run: Annotated[Path | None, typer.Option(help="Run folder; runs/<name> if left out.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in that folder.")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: a.b=value.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a federation on this machine: train, score, report."""
    from panorgan.cli.training import train_and_report

    train_and_report(experiment, run, resume, overrides or [], as_json)


@app.command()
def evaluate(run: RunPath, as_json: AsJson = False) -> None:
    """Score the model of a finished run again and rewrite metrics.csv."""
    from panorgan.cli.training import evaluate_run

    evaluate_run(run, as_json)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="A run folder, or its model folder.")],
    scans: Annotated[list[Path], typer.Argument(help="NIfTI files, or a folder of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the label maps.")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Segment scans: a label map on each scan's own grid, organ names in a JSON file beside it."""
    from panorgan.cli.prediction import predict_scans

    predict_scans(model, scans, out, device, as_json)


@app.command()
def report(run: RunPath, as_json: AsJson = False) -> None:
    """Write report.html for a finished run."""
    from panorgan.report import write_report

    path = write_report(run)
    typer.echo(json.dumps({"report": str(path)}) if as_json else f"Report: {path}")


@app.command()
def methods(as_json: AsJson = False) -> None:
    """What there is to choose from under `method`."""
    print_methods(as_json)


@app.command()
def organs(as_json: AsJson = False) -> None:
    """The organs panorgan knows, with codes and other names for them."""
    print_organs(as_json)
