"""The `panorgan` command. Heavy imports wait until a command needs them, so that `--help` is quick."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import panorgan
from panorgan.cli.completion import complete_data_set, complete_method, complete_methods, complete_organ
from panorgan.cli.console import Console, say
from panorgan.cli.federation import app as federation_app
from panorgan.cli.loading import load
from panorgan.cli.methods import print_methods, print_yaml
from panorgan.cli.organs import print_organs
from panorgan.cli.quick_check import check_experiment_file, check_method_names, check_run_exists
from panorgan.errors import PanorganError

# On a shared machine, CPU threads that spin long while they wait slow each other down many times over. A short spin
# costs nothing. This must be set before torch is imported; the user's own settings stay.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

app = typer.Typer(
    name="panorgan",
    help="Hospitals that each label different organs train one model that segments them all.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
# Groups of the commands in `panorgan -h`.
_TRAIN, _DATA, _RESULTS = "Train and compare", "Data and experiment file", "Follow a run, and read its results"
_MODEL, _HOSPITALS, _REFERENCE = "Use a model", "Between hospitals", "Look up, tidy up"
app.add_typer(federation_app, name="federation", rich_help_panel=_HOSPITALS)

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output: one JSON object per line.")]
_INTERRUPTED = 130
_REFUSALS = (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
_NO_ROOM = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)

RunPath = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]


def main() -> None:
    """Run the command line; errors that a user can act on become a message and an exit code."""
    try:
        app()
    except PanorganError as error:
        _show_error(error)
        sys.exit(error.exit_code)
    except (OSError, MemoryError, RuntimeError) as error:
        known = _machine_trouble(error)
        if known is None:  # a defect: show the traceback
            raise
        _show_error(known)
        sys.exit(known.exit_code)
    except SystemExit as end:
        # typer's code for Ctrl-C
        if end.code == _INTERRUPTED and (words := _stopped(sys.argv[1:])):
            Console(stderr=True, highlight=False).print(words)
        raise


def _stopped(arguments: list[str]) -> str:
    """What Ctrl-C has ended, and how it goes on. A command that only looks ends nothing else."""
    first, second = (*arguments, "", "")[:2]
    if (first, second) == ("federation", "start"):  # it has said what goes on, and how to end that
        return ""
    if "watch" in (first, second) or (second == "status" and "--watch" in arguments):
        return "Stopped watching. The run is as it was."
    if first in ("train", "demo", "finetune"):
        return "Stopped. Continue with the same command and --resume."
    return "Stopped. Continue with the same command." if first in ("compare", "ablate", "fetch") else "Stopped."


def _machine_trouble(error: Exception) -> PanorganError | None:
    """Failures of the machine (no permission, a full disk, no memory), as an error with a fix."""
    if isinstance(error, OSError):
        if not isinstance(error, _REFUSALS) and error.errno not in _NO_ROOM:
            return None
        return PanorganError(
            "A file or folder cannot be used.",
            code="file-refused",
            where=str(error.filename or ""),
            why=error.strerror or str(error),
            fix="Check that the disk has room and that you may write there, or choose another folder.",
        )
    text = str(error).lower()
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        return PanorganError(
            "There is not enough memory.",
            code="out-of-memory",
            why=str(error).splitlines()[0] if str(error) else "",
            fix="Lower training.sampling.batch_size or patch_size, or choose a coarser plan.spacing_mm.",
        )
    return None


def _show_error(error: PanorganError) -> None:
    if "--json" in sys.argv:
        print(json.dumps({"error": error.what, "code": error.code, **dict(error.details())}), flush=True)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    code = rf" [dim]\[{error.code}][/]" if error.code else ""
    console.print(f"[bold red]Error:[/] {_plain(error.what)}{code}")
    for label, text in error.details():
        # Multi-line parts (a YAML error points with a caret) keep their columns.
        indented = _plain(text).replace("\n", "\n" + " " * 9)
        console.print(f"  [bold]{label + ':':<7}[/]{indented}")


def _plain(text: str) -> str:
    """Escape markup: square brackets of a message are plain text."""
    return text.replace("[", r"\[")


@app.callback(invoke_without_command=True)
def _common(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        typer.echo(f"panorgan {panorgan.__version__}")
        raise typer.Exit


@app.command(rich_help_panel=_TRAIN)
def demo(
    run: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Another seed gives other phantoms.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted demo.")] = False,
    as_json: AsJson = False,
) -> None:
    """Three generated hospitals with different labels: train a federation, each alone, and a naive pooling."""
    load("panorgan.cli.demo")
    from panorgan.cli.demo import run_demo

    run_demo(run, seed, resume, as_json)


@app.command(rich_help_panel=_DATA)
def doctor(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Data folders, tables of cases (.csv), or experiment files (.yaml: all of their sites).",
            metavar="PATH",
        ),
    ],
    html: Annotated[Path, typer.Option(help="Path of the page with pictures.", metavar="FILE")] = Path("doctor.html"),
    no_html: Annotated[bool, typer.Option("--no-html", help="Write no page.")] = False,
    fix_headers: Annotated[
        Path | None,
        typer.Option(help="Write corrected copies of files with a wrong header into this folder.", metavar="OUT"),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too.")] = False,
    layout: Annotated[str, typer.Option(help="Layout of a folder; detected by default.", metavar="NAME")] = "auto",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Cases read at the same time; by default from the number of cores.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check data before training on it: reads everything, changes nothing.

    Exit code: 0 when nothing is worse than a warning, 1 for warnings with --strict, 2 for errors.
    """
    for path in paths:
        if path.suffix in (".yaml", ".yml"):
            check_experiment_file(path, data=False)
    load("panorgan.workflows.doctor")
    from panorgan.cli.doctor import DoctorRequest, run_doctor

    request = DoctorRequest(tuple(paths), layout, workers, None if no_html else html, fix_headers, strict, as_json)
    raise typer.Exit(run_doctor(request))


@app.command("init", rich_help_panel=_DATA)
def init_command(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders with scans and labels, one per site.", metavar="FOLDER")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for experiment.yaml and the tables of cases.", metavar="FOLDER")
    ] = Path("experiment"),
    labels: Annotated[
        list[str] | None,
        typer.Option(
            help="What labels are: 1=liver,2=spleen; of one site: SITE:1=liver. '-' leaves a label out, +NAME is an "
            "organ that the catalogue lacks. May be repeated.",
            metavar="LABELS",
        ),
    ] = None,
    organs: Annotated[
        str, typer.Option(help="Organs to segment, separated by commas; all that are labelled.", metavar="ORGANS")
    ] = "",
    scan_file: Annotated[
        str, typer.Option(help="A word in the name of the right scan, where a case has several.", metavar="WORD")
    ] = "",
    label_file: Annotated[
        str, typer.Option(help="A word in the name of the right label file, where a case has several.", metavar="WORD")
    ] = "",
    one_site: Annotated[bool, typer.Option("--one-site", help="Folders within the folder are no sites.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take the guesses.")] = False,
    as_json: AsJson = False,
) -> None:
    """Draft an experiment from ordinary folders: finds scans and labels, says what the labels may be."""
    from panorgan.cli.init import InitRequest, run_init

    chosen = (tuple(folders), out, tuple(labels or ()), organs, scan_file, label_file, one_site)
    run_init(InitRequest(*chosen, ask=not yes, as_json=as_json))


@app.command(rich_help_panel=_TRAIN)
def train(
    experiment: Annotated[Path, typer.Argument(help="The experiment file.", metavar="EXPERIMENT.yaml")],
    run: Annotated[Path | None, typer.Option(help="Run folder; runs/<name> if left out.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in that folder.")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: a.b=value.")] = None,
    baselines: Annotated[
        str,
        typer.Option(
            help="Other methods to train for the same report: solo,central_full.",
            metavar="METHODS",
            autocompletion=complete_methods,
        ),
    ] = "",
    beside: Annotated[str, typer.Option(help="The old name of --baselines.", metavar="METHODS", hidden=True)] = "",
    mlflow: Annotated[
        Path | None, typer.Option(help="Log into this folder for MLflow too (extra 'mlflow').", metavar="FOLDER")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a federation on this machine: train, score, report."""
    check_experiment_file(experiment, overrides or [], data=not resume)
    check_method_names(f"{baselines},{beside}", "--baselines")
    load("panorgan.cli.train")
    from panorgan.cli.train import train_and_report

    if beside:
        say("--beside is now called --baselines; the old name still works.", sys.stderr)
    others = [method.strip() for method in f"{baselines},{beside}".split(",") if method.strip()]
    train_and_report(experiment, run, resume, overrides or [], others, as_json, mlflow)


@app.command(rich_help_panel=_TRAIN)
def compare(
    experiment: Annotated[Path, typer.Argument(help="The experiment file.", metavar="EXPERIMENT.yaml")],
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help="Methods separated by commas, each with its own settings: a,b+mu=0.1,name=c.",
            metavar="METHODS",
            autocompletion=complete_methods,
        ),
    ],
    seeds: Annotated[str, typer.Option(help="Seeds separated by commas; one run of every method each.")] = "0,1,2",
    reference: Annotated[
        str | None,
        typer.Option("--reference", help="The reference of the tests; fedavg, or the first method.", metavar="METHOD"),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Folder for all runs; runs/<name>-compare if left out.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: a.b=value.")] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Train nothing; write the files again from finished runs.")
    ] = False,
    at_once: Annotated[
        int, typer.Option("--at-once", min=1, help="Runs that train at the same time, each in its own process.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Train several methods with several seeds and compare them; continues where it was stopped."""
    check_experiment_file(experiment, overrides or [], data=not report_only)
    check_method_names(methods, "--methods")
    load("panorgan.cli.compare")
    from panorgan.cli.compare import CompareRequest, run_compare

    request = CompareRequest(experiment, methods, seeds, reference, run, overrides or [], report_only, as_json, at_once)
    raise typer.Exit(run_compare(request))


@app.command(rich_help_panel=_TRAIN)
def ablate(
    experiment: Annotated[Path, typer.Argument(help="The experiment file.", metavar="EXPERIMENT.yaml")],
    method: Annotated[
        str | None,
        typer.Option(
            help="The method; the experiment's own if left out.", metavar="METHOD", autocompletion=complete_method
        ),
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help="Rows of the table, separated by commas; all if left out.", metavar="ROWS")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds separated by commas; one run of every row each.")] = "0,1,2",
    reference: Annotated[
        str | None,
        typer.Option(help="The reference of the tests; the method's plainest row.", metavar="ROW"),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder for all runs; runs/<name>-ablate-<method> if left out.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: a.b=value.")] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Train nothing; write the files again from finished runs.")
    ] = False,
    at_once: Annotated[
        int, typer.Option("--at-once", min=1, help="Runs that train at the same time, each in its own process.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Train the rows of a method's module table, as in its paper; continues where it was stopped."""
    check_experiment_file(experiment, overrides or [], data=not report_only)
    check_method_names(method or "", "--method")
    load("panorgan.cli.ablate")
    from panorgan.cli.ablate import AblateRequest, run_ablate

    request = AblateRequest(
        experiment, method, rows, seeds, reference, run, overrides or [], report_only, as_json, at_once
    )
    raise typer.Exit(run_ablate(request))


@app.command(rich_help_panel=_TRAIN)
def finetune(
    source: Annotated[Path, typer.Argument(help="A finished run, or a site's kit.", metavar="RUN|KIT")],
    site: Annotated[str | None, typer.Option(help="The site, of a run with several.", metavar="NAME")] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run folder; runs/<name>-<site>, or 'finetuned' in the kit, if left out.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in that folder.")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: a.b=value.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a delivered model on with the cases of one site; the model itself stays, and nothing is sent."""
    check_run_exists(source)
    load("panorgan.cli.finetune")
    from panorgan.cli.finetune import FinetuneRequest, run_finetune

    run_finetune(FinetuneRequest(source, site, run, overrides or [], resume, as_json))


@app.command(rich_help_panel=_DATA)
def plan(
    experiment: Annotated[Path, typer.Argument(help="The experiment file.", metavar="EXPERIMENT.yaml")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: a.b=value.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=1, help="How long training may take; a night (480) if left out.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write into the file what it does not set; comments and settings stay.")
    ] = False,
    write_to: Annotated[
        Path | None, typer.Option(help="Write a new file beside it, with everything proposed.", metavar="NEW.yaml")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the sites' scans; show the plan, and a network, patch and rounds that suit this machine."""
    check_experiment_file(experiment, overrides or [])
    load("panorgan.cli.plan")
    from panorgan.cli.plan import PlanRequest, show_plan

    show_plan(PlanRequest(experiment, overrides or [], minutes, write, write_to, as_json))


@app.command(rich_help_panel=_DATA)
def phantom(
    folder: Annotated[Path, typer.Argument(help="Folder for the hospitals; new or empty.", metavar="FOLDER")],
    experiment: Annotated[
        Path | None,
        typer.Option(help="An experiment with a 'phantom' section; the demo's if left out.", metavar="FILE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write generated hospitals as ordinary data folders, for trials without real data."""
    load("panorgan.cli.phantom")
    from panorgan.cli.phantom import write_hospitals

    write_hospitals(folder, experiment, as_json)


@app.command(rich_help_panel=_DATA)
def fetch(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A data set; all are listed if left out.", metavar="NAME", autocompletion=complete_data_set
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Folder for data sets; PANORGAN_DATA or 'data' if left out.", metavar="FOLDER")
    ] = None,
    source: Annotated[
        str, typer.Option("--from", help="Another address of the same archive, or a file.", metavar="URL|FILE")
    ] = "",
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="Do not ask: the licence is known and accepted.")
    ] = False,
    keep_archive: Annotated[bool, typer.Option("--keep-archive", help="Do not remove the downloaded archive.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a public data set with its licence; a download that broke off is continued."""
    from panorgan.cli.fetch import FetchRequest, run_fetch

    run_fetch(FetchRequest(name, to, source, accept_licence, keep_archive, as_json))


@app.command(rich_help_panel=_RESULTS)
def evaluate(run: RunPath, as_json: AsJson = False) -> None:
    """Score the model of a finished run again and rewrite metrics.csv."""
    check_run_exists(run)
    load("panorgan.cli.evaluate")
    from panorgan.cli.evaluate import evaluate_run

    evaluate_run(run, as_json)


@app.command(rich_help_panel=_MODEL)
def predict(
    model: Annotated[Path, typer.Argument(help="A run folder, or its model folder.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the label maps.")],
    scans: Annotated[
        list[Path] | None,
        typer.Argument(help="Scans (NIfTI, MetaImage, NRRD), a folder of them, or a DICOM folder with any series."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    series: Annotated[
        list[str] | None,
        typer.Option(
            "--series",
            help="A DICOM series, by number, description or UID. May be repeated; all series if left out.",
            metavar="SERIES",
        ),
    ] = None,
    formats: Annotated[
        str,
        typer.Option(
            "--format",
            help="nifti, seg.nrrd (3D Slicer), and of DICOM series dicom-seg, dicom-seg-labelmap, rtstruct; "
            "several with commas.",
            metavar="FORMATS",
        ),
    ] = "nifti",
    origin: Annotated[
        str, typer.Option("--from", help="Read a study's series from a DICOMweb server (WADO-RS).", metavar="URL")
    ] = "",
    study: Annotated[str, typer.Option("--study", help="With --from: the study.", metavar="UID")] = "",
    to: Annotated[
        str, typer.Option("--to", help="Store the DICOM results at a DICOMweb server (STOW-RS).", metavar="URL")
    ] = "",
    credentials: Annotated[
        Path | None,
        typer.Option(
            "--credentials",
            help="YAML file with user and password, or token, and ca; else PANORGAN_DICOMWEB_USER, …",
            metavar="FILE",
        ),
    ] = None,
    organs: Annotated[
        str, typer.Option("--organs", help="Only these, separated by commas; all if left out.", metavar="ORGANS")
    ] = "",
    preview: Annotated[
        bool, typer.Option("--preview", help="A picture of three planes beside each label map.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Segment scans: a label map on each scan's own grid; organ names, volumes and doubts in a JSON file beside it."""
    check_run_exists(model)
    load("panorgan.cli.predict")
    from panorgan.cli.predict import PredictRequest, predict_scans
    from panorgan.cli.predict_dicomweb import DicomWebRequest
    from panorgan.workflows.outputs import parse_formats

    web = DicomWebRequest(origin, study, to, credentials)
    wanted = [organ.strip() for organ in organs.split(",") if organ.strip()]
    formats_wanted = parse_formats(formats)
    predict_scans(
        PredictRequest(model, scans or (), out, device, series or (), as_json, formats_wanted, web, wanted, preview)
    )


@app.command(rich_help_panel=_RESULTS)
def analyze(
    run: RunPath,
    against: Annotated[
        list[Path] | None,
        typer.Option("--against", help="Another run: compare layers with its model. May be repeated.", metavar="RUN"),
    ] = None,
    eigenvalues: Annotated[
        int, typer.Option("--eigenvalues", min=0, help="Largest eigenvalues of the Hessian; 0 for none.")
    ] = 5,
    probes: Annotated[
        int, typer.Option("--probes", min=0, help="Random vectors for the Hessian's trace; 0 for no trace.")
    ] = 16,
    grid: Annotated[
        int, typer.Option("--grid", min=0, help="Points along a side of the loss landscape, odd; 0 for none.")
    ] = 15,
    radius: Annotated[
        float, typer.Option("--radius", help="Extent of the landscape, in lengths of the model's filters.")
    ] = 1.0,
    batches: Annotated[int, typer.Option("--batches", min=1, help="Batches of patches per site.")] = 4,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Patches per batch; the experiment's if left out.")
    ] = None,
    split: Annotated[
        str, typer.Option("--split", help="Cases to cut patches from: validation or train.")
    ] = "validation",
    seed: Annotated[int, typer.Option("--seed", help="For patches, directions and probes.")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Analyse a finished run: curvature and landscape of its loss, similarity of layers; adds them to its report."""
    for one in (run, *(against or ())):
        check_run_exists(one)
    load("panorgan.cli.analyze")
    from panorgan.cli.analyze import AnalyzeRequest, run_analyze

    settings = {
        "eigenvalues": eigenvalues,
        "probes": probes,
        "grid": grid,
        "radius": radius,
        "batches": batches,
        "batch_size": batch_size,
        "split": split,
        "seed": seed,
    }
    run_analyze(AnalyzeRequest(run, against or [], settings, device, as_json))


@app.command(rich_help_panel=_RESULTS)
def watch(
    run: RunPath,
    port: Annotated[int, typer.Option(help="Port of the page on this machine; 0 takes a free one.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, open nothing.")] = False,
    opened: Annotated[bool, typer.Option("--open", help="The old way to open a browser.", hidden=True)] = False,
    as_json: AsJson = False,
) -> None:
    """Follow a run in the browser: rounds, losses, Dice, notices. It may go on, be over, or not have begun."""
    load("panorgan.cli.watch")
    from panorgan.cli.watch import watch_run

    watch_run(run, port, opened or not no_browser, as_json)


@app.command(rich_help_panel=_RESULTS)
def report(
    run: Annotated[Path, typer.Argument(help="A run folder, or a kit of a federation.", metavar="RUN|KIT")],
    as_json: AsJson = False,
) -> None:
    """Write report.html: of a finished run, or in a kit of a federation, at the server or at a site."""
    check_run_exists(run)
    load("panorgan.report.page")
    from panorgan.cli.report import write_and_say

    write_and_say(run, as_json)


@app.command(rich_help_panel=_RESULTS)
def view(
    path: Annotated[
        Path,
        typer.Argument(
            help="A run, a comparison, a prediction or a folder of them, doctor.html, a data folder, or a scan.",
            metavar="RUN|PREDICTION|FOLDER",
        ),
    ],
    case: Annotated[str, typer.Option("--case", help="The case to begin with, by name or SITE/NAME.")] = "",
    organ: Annotated[str, typer.Option("--organ", help="Begin at this organ, and sort cases by it.")] = "",
    scan: Annotated[
        Path | None,
        typer.Option("--scan", help="The scan of a prediction, or the folder of the scans, where these have moved."),
    ] = None,
    layout: Annotated[str, typer.Option(help="Layout of a data folder; detected by default.", metavar="NAME")] = "auto",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, open nothing.")] = False,
    seconds: Annotated[
        float | None, typer.Option("--for", min=0, help="Stop after this many seconds.", metavar="SECONDS")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look at scans, labels and predictions in the browser; nothing leaves this machine."""
    from panorgan.cli.viewer import ViewRequest
    from panorgan.cli.viewer import view as serve

    serve(ViewRequest(path, case, organ, scan, layout, port, not no_browser, seconds, as_json))


@app.command(rich_help_panel=_MODEL)
def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or its model folder.", metavar="RUN")],
    to: Annotated[str, typer.Option(help="bundle (MONAI), onnx, or nnunet (a model folder of nnU-Net v2).")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A new folder; export/<to> in the run folder if left out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a finished run's model for other software, with a model card, and compare it with the model."""
    check_run_exists(run)
    load("panorgan.cli.export")
    from panorgan.cli.export import export_model

    export_model(run, to, out, as_json)


@app.command(rich_help_panel=_REFERENCE)
def cache(
    folder: Annotated[
        Path | None,
        typer.Option(help="Another cache, such as that of a site's kit. PANORGAN_CACHE or the user's if left out."),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove everything that no running process uses.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", min=0, help="Remove what was not used for this many days.", metavar="DAYS"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show prepared scans and generated hospitals in the cache; remove them."""
    load("panorgan.cli.cache")
    from panorgan.cli.cache import run_cache

    run_cache(folder, clear, older_than, as_json)


@app.command(rich_help_panel=_REFERENCE)
def methods(
    name: Annotated[
        str | None, typer.Argument(help="Show one method in full.", metavar="NAME", autocompletion=complete_method)
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="As a page: docs/methods.md, or the section about NAME.")
    ] = False,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="As an experiment file to start from, that of NAME's paper if it has one.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """The methods to choose from under `method`."""
    if as_json + as_markdown + as_yaml > 1:
        raise typer.BadParameter("choose one of --json, --markdown and --yaml")
    if as_yaml:
        if name is None:
            raise typer.BadParameter("--yaml needs the NAME of a method")
        print_yaml(name)
        return
    print_methods(name, as_json, as_markdown)


@app.command(rich_help_panel=_REFERENCE)
def schema(
    file: Annotated[str, typer.Argument(help="experiment, federation or site.", metavar="FILE")] = "experiment",
) -> None:
    """The JSON schema of a settings file, for editors that complete and check YAML."""
    load("panorgan.cli.schema")
    from panorgan.cli.schema import print_schema

    print_schema(file)


@app.command(rich_help_panel=_REFERENCE)
def organs(
    text: Annotated[
        str,
        typer.Argument(help="Only organs with this in a name.", metavar="[TEXT]", autocompletion=complete_organ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """The organs of the catalogue, with codes and aliases."""
    print_organs(as_json, text)
