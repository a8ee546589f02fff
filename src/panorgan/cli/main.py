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
_TRAIN, _DATA, _RESULTS = "Train and compare", "Data and experiment file", "Follow a run and read its results"
_MODEL, _HOSPITALS, _REFERENCE = "Use a model", "Between hospitals", "Reference and cache"
app.add_typer(federation_app, name="federation", rich_help_panel=_HOSPITALS)

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output: one JSON object per line.")]
_INTERRUPTED = 130
_REFUSALS = (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
_NO_ROOM = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)

RunPath = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a setting: a.b=value.")]
ReportOnly = Annotated[bool, typer.Option("--report-only", help="Train nothing; rewrite the files from finished runs.")]
AtOnce = Annotated[int, typer.Option("--at-once", min=1, help="Runs to train in parallel, each in its own process.")]


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
    """What Ctrl-C has stopped, and how to continue. A command that only watches stops nothing else."""
    first, second = (*arguments, "", "")[:2]
    if (first, second) == ("federation", "start"):  # it has said what continues, and how to end that
        return ""
    if "watch" in (first, second) or (second == "status" and "--watch" in arguments):
        return "Stopped watching; the run itself is unaffected."
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
            fix="Check free disk space and write permission, or choose another folder.",
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
    seed: Annotated[int, typer.Option(help="Seed of the generated hospitals.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted demo.")] = False,
    as_json: AsJson = False,
) -> None:
    """Generate three hospitals with different labels; train a federation, each site alone, and naive pooling."""
    load("panorgan.cli.demo")
    from panorgan.cli.demo import run_demo

    run_demo(run, seed, resume, as_json)


@app.command(rich_help_panel=_DATA)
def doctor(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Data folders, tables of cases (.csv), or experiment files (.yaml, for all their sites).",
            metavar="PATH",
        ),
    ],
    html: Annotated[Path, typer.Option(help="Path of the page with pictures.", metavar="FILE")] = Path("doctor.html"),
    no_html: Annotated[bool, typer.Option("--no-html", help="Do not write the page.")] = False,
    fix_headers: Annotated[
        Path | None,
        typer.Option(help="Write a copy of the data, with wrong headers corrected, to this new folder.", metavar="OUT"),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 on warnings.")] = False,
    layout: Annotated[str, typer.Option(help="Layout of a folder; detected by default.", metavar="NAME")] = "auto",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Cases read in parallel; default: from cores and memory.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check data for anything that would spoil training; reads everything, changes nothing.

    Exit code: 0 if nothing is worse than a warning, 1 for warnings with --strict, 2 for errors.
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
            help="Meaning of labels: 1=liver,2=spleen; for one site: SITE:1=liver. '-' leaves a label out, +NAME adds "
            "an organ that the catalogue lacks. Repeatable.",
            metavar="LABELS",
        ),
    ] = None,
    organs: Annotated[
        str, typer.Option(help="Organs to segment, comma-separated; default: all labelled ones.", metavar="ORGANS")
    ] = "",
    scan_file: Annotated[
        str, typer.Option(help="Word in the name of the scan to use, if a case has several.", metavar="WORD")
    ] = "",
    label_file: Annotated[
        str, typer.Option(help="Word in the name of the label file to use, if a case has several.", metavar="WORD")
    ] = "",
    one_site: Annotated[bool, typer.Option("--one-site", help="Treat subfolders as part of one site.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; accept the guesses.")] = False,
    as_json: AsJson = False,
) -> None:
    """Draft an experiment file from folders of any shape: finds scans and labels, guesses their organs."""
    from panorgan.cli.init import InitRequest, run_init

    chosen = (tuple(folders), out, tuple(labels or ()), organs, scan_file, label_file, one_site)
    run_init(InitRequest(*chosen, ask=not yes, as_json=as_json))


@app.command(rich_help_panel=_TRAIN)
def train(
    experiment: Annotated[Path, typer.Argument(help="The experiment file.", metavar="EXPERIMENT.yaml")],
    run: Annotated[Path | None, typer.Option(help="Run folder; default: runs/<name>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in that folder.")] = False,
    overrides: Overrides = None,
    baselines: Annotated[
        str,
        typer.Option(
            help="Methods to train for comparison in the same report: solo,central_full.",
            metavar="METHODS",
            autocompletion=complete_methods,
        ),
    ] = "",
    beside: Annotated[str, typer.Option(help="The old name of --baselines.", metavar="METHODS", hidden=True)] = "",
    mlflow: Annotated[
        Path | None, typer.Option(help="Also log to this folder for MLflow (extra 'mlflow').", metavar="FOLDER")
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
            help="Methods, comma-separated, each with optional settings: a,b+mu=0.1,name=c.",
            metavar="METHODS",
            autocompletion=complete_methods,
        ),
    ],
    seeds: Annotated[str, typer.Option(help="Seeds, comma-separated; every method runs once per seed.")] = "0,1,2",
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            help="Method that the others are tested against; default: fedavg, else the first.",
            metavar="METHOD",
        ),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Folder for all runs; default: runs/<name>-compare.")] = None,
    overrides: Overrides = None,
    report_only: ReportOnly = False,
    at_once: AtOnce = 1,
    as_json: AsJson = False,
) -> None:
    """Train several methods with several seeds and compare them; resumes if interrupted."""
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
            help="The method; default: the experiment's own.", metavar="METHOD", autocompletion=complete_method
        ),
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help="Rows of the table, comma-separated; default: all.", metavar="ROWS")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, comma-separated; every row runs once per seed.")] = "0,1,2",
    reference: Annotated[
        str | None,
        typer.Option(help="Row that the others are tested against; default: the method's plainest.", metavar="ROW"),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Folder for all runs; default: runs/<name>-ablate-<method>.")] = None,
    overrides: Overrides = None,
    report_only: ReportOnly = False,
    at_once: AtOnce = 1,
    as_json: AsJson = False,
) -> None:
    """Train the ablation table of a method's paper, row by row; resumes if interrupted."""
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
    site: Annotated[str | None, typer.Option(help="The site, if the run has several.", metavar="NAME")] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run folder; default: runs/<name>-<site>, or 'finetuned' in the kit.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in that folder.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a delivered model on one site's cases; the original is kept, and nothing is sent."""
    check_run_exists(source)
    load("panorgan.cli.finetune")
    from panorgan.cli.finetune import FinetuneRequest, run_finetune

    run_finetune(FinetuneRequest(source, site, run, overrides or [], resume, as_json))


@app.command(rich_help_panel=_DATA)
def plan(
    experiment: Annotated[Path, typer.Argument(help="The experiment file.", metavar="EXPERIMENT.yaml")],
    overrides: Overrides = None,
    minutes: Annotated[
        float | None, typer.Option(min=1, help="Time budget for training; default: a night (480).")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Add settings that the file lacks; its comments and settings are kept.")
    ] = False,
    write_to: Annotated[
        Path | None, typer.Option(help="Write a new file next to it, with all proposed settings.", metavar="NEW.yaml")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the sites' scans; propose voxel size, intensities, network, patch and rounds for this machine."""
    check_experiment_file(experiment, overrides or [])
    load("panorgan.cli.plan")
    from panorgan.cli.plan import PlanRequest, show_plan

    show_plan(PlanRequest(experiment, overrides or [], minutes, write, write_to, as_json))


@app.command(rich_help_panel=_DATA)
def phantom(
    folder: Annotated[Path, typer.Argument(help="Folder for the hospitals; new or empty.", metavar="FOLDER")],
    experiment: Annotated[
        Path | None,
        typer.Option(help="An experiment with a 'phantom' section; default: the demo's.", metavar="FILE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Generate hospitals as ordinary data folders, to try panorgan without real data."""
    load("panorgan.cli.phantom")
    from panorgan.cli.phantom import write_hospitals

    write_hospitals(folder, experiment, as_json)


@app.command(rich_help_panel=_DATA)
def fetch(
    name: Annotated[
        str | None,
        typer.Argument(help="A data set; lists all if omitted.", metavar="NAME", autocompletion=complete_data_set),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Folder for data sets; default: PANORGAN_DATA, else 'data'.", metavar="FOLDER")
    ] = None,
    source: Annotated[
        str, typer.Option("--from", help="Another URL of the same archive, or a file.", metavar="URL|FILE")
    ] = "",
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="Accept the licence without being asked.")
    ] = False,
    keep_archive: Annotated[bool, typer.Option("--keep-archive", help="Keep the downloaded archive.")] = False,
    as_json: AsJson = False,
) -> None:
    """Download a public data set with its licence; resumes interrupted downloads."""
    from panorgan.cli.fetch import FetchRequest, run_fetch

    run_fetch(FetchRequest(name, to, source, accept_licence, keep_archive, as_json))


@app.command(rich_help_panel=_RESULTS)
def evaluate(run: RunPath, as_json: AsJson = False) -> None:
    """Score a finished run's model again and rewrite metrics.csv."""
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
        typer.Argument(help="Scans (NIfTI, MetaImage, NRRD), a folder of scans, or a DICOM folder."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    series: Annotated[
        list[str] | None,
        typer.Option(
            "--series",
            help="DICOM series, by number, description or UID; repeatable; default: all.",
            metavar="SERIES",
        ),
    ] = None,
    formats: Annotated[
        str,
        typer.Option(
            "--format",
            help="nifti, seg.nrrd (3D Slicer), and for DICOM series dicom-seg, dicom-seg-labelmap, rtstruct; "
            "comma-separated.",
            metavar="FORMATS",
        ),
    ] = "nifti",
    origin: Annotated[
        str, typer.Option("--from", help="Fetch a study's series from a DICOMweb server (WADO-RS).", metavar="URL")
    ] = "",
    study: Annotated[str, typer.Option("--study", help="The study to fetch, with --from.", metavar="UID")] = "",
    to: Annotated[
        str, typer.Option("--to", help="Store the DICOM results on a DICOMweb server (STOW-RS).", metavar="URL")
    ] = "",
    credentials: Annotated[
        Path | None,
        typer.Option(
            "--credentials",
            help="YAML file with user and password, or token, and ca; default: PANORGAN_DICOMWEB_USER, …",
            metavar="FILE",
        ),
    ] = None,
    organs: Annotated[
        str, typer.Option("--organs", help="Organs to segment, comma-separated; default: all.", metavar="ORGANS")
    ] = "",
    preview: Annotated[
        bool, typer.Option("--preview", help="Write a picture of three planes next to each label map.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Segment scans: writes label maps on each scan's own grid, with organ names, volumes and doubts as JSON."""
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
        typer.Option("--against", help="Another run, to compare layers with its model; repeatable.", metavar="RUN"),
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
        int | None, typer.Option("--batch-size", min=1, help="Patches per batch; default: the experiment's.")
    ] = None,
    split: Annotated[
        str, typer.Option("--split", help="Cases to cut patches from: validation or train.")
    ] = "validation",
    seed: Annotated[int, typer.Option("--seed", help="Seed for patches, directions and probes.")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Analyse a finished run: loss curvature and landscape, similarity of layers; extends its report."""
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
    port: Annotated[int, typer.Option(help="Port of the page on this machine; 0 chooses a free one.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
    opened: Annotated[bool, typer.Option("--open", help="The old way to open a browser.", hidden=True)] = False,
    as_json: AsJson = False,
) -> None:
    """Follow a run in the browser, before, during or after it: rounds, losses, Dice, notices."""
    load("panorgan.cli.watch")
    from panorgan.cli.watch import watch_run

    watch_run(run, port, opened or not no_browser, as_json)


@app.command(rich_help_panel=_RESULTS)
def report(
    run: Annotated[Path, typer.Argument(help="A run folder, or a kit of a federation.", metavar="RUN|KIT")],
    as_json: AsJson = False,
) -> None:
    """Write report.html for a finished run, or in a federation's kit (server or site)."""
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
    case: Annotated[str, typer.Option("--case", help="First case to show, by name or SITE/NAME.")] = "",
    organ: Annotated[str, typer.Option("--organ", help="Go to this organ, and sort cases by it.")] = "",
    scan: Annotated[
        Path | None,
        typer.Option("--scan", help="Scan of a prediction, or folder of scans, if they have moved."),
    ] = None,
    layout: Annotated[str, typer.Option(help="Layout of a data folder; detected by default.", metavar="NAME")] = "auto",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on this machine; 0 chooses a free one.")
    ] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
    seconds: Annotated[
        float | None, typer.Option("--for", min=0, help="Stop after this many seconds.", metavar="SECONDS")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """View scans, labels and predictions in the browser; nothing leaves this machine."""
    from panorgan.cli.viewer import ViewRequest
    from panorgan.cli.viewer import view as serve

    serve(ViewRequest(path, case, organ, scan, layout, port, not no_browser, seconds, as_json))


@app.command(rich_help_panel=_MODEL)
def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or its model folder.", metavar="RUN")],
    to: Annotated[str, typer.Option(help="bundle (MONAI), onnx, or nnunet (nnU-Net v2 model folder).")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="New folder; default: export/<to> in the run folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export a finished run's model for other software, with a model card, and verify the export."""
    check_run_exists(run)
    load("panorgan.cli.export")
    from panorgan.cli.export import export_model

    export_model(run, to, out, as_json)


@app.command(rich_help_panel=_REFERENCE)
def cache(
    folder: Annotated[
        Path | None,
        typer.Option(help="Another cache, such as a site kit's; default: PANORGAN_CACHE, else the user's."),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all entries that no running process uses.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", min=0, help="Remove entries not used for this many days.", metavar="DAYS"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show or clear the cache of prepared scans and generated hospitals."""
    load("panorgan.cli.cache")
    from panorgan.cli.cache import run_cache

    run_cache(folder, clear, older_than, as_json)


@app.command(rich_help_panel=_REFERENCE)
def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method to show in full.", metavar="NAME", autocompletion=complete_method)
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print as Markdown: docs/methods.md, or the section on NAME.")
    ] = False,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print an experiment file to start from; NAME's paper's, if there is one.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the methods, or describe one."""
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
    """Print the JSON schema of a settings file, for editors that complete and check YAML."""
    load("panorgan.cli.schema")
    from panorgan.cli.schema import print_schema

    print_schema(file)


@app.command(rich_help_panel=_REFERENCE)
def organs(
    text: Annotated[
        str,
        typer.Argument(
            help="List only organs whose names contain this.", metavar="[TEXT]", autocompletion=complete_organ
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the organs of the catalogue, with codes and aliases."""
    print_organs(as_json, text)
