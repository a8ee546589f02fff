"""`panorgan predict`: scans in, label maps on their own grids out."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from panorgan import Model, load_model
from panorgan.cli.console import Console
from panorgan.cli.predict_dicomweb import DicomWebRequest
from panorgan.cli.progress import progress_bar
from panorgan.data.volume import Volume, read_scan, source_files
from panorgan.data_doctor.files import Problem
from panorgan.errors import DataError
from panorgan.workflows.device import choose_device
from panorgan.workflows.input_doubts import LABELS
from panorgan.workflows.model_bundle import channels_of_model
from panorgan.workflows.outputs import NIFTI, check_source, output_files, side_file
from panorgan.workflows.prediction import Prediction
from panorgan.workflows.scans_to_segment import Found, Scan, find_scans
from panorgan.workflows.volume_table import NAME as VOLUMES
from panorgan.workflows.volume_table import add_volumes, check_volumes


@dataclass(frozen=True)
class PredictRequest:
    """The options of the command line. `series` chooses among DICOM series, `organs` among organs; all if empty."""

    model: Path
    scans: Sequence[Path]
    out: Path
    device: str = "auto"
    series: Sequence[str] = ()
    as_json: bool = False
    formats: tuple[str, ...] = (NIFTI,)
    web: DicomWebRequest = field(default_factory=DicomWebRequest)
    organs: Sequence[str] = ()
    preview: bool = False


def predict_scans(request: PredictRequest) -> None:
    """Predict every readable scan, then fail for the others; nothing is written for them."""
    # What is wrong with the scans shows before a model is loaded.
    channels = channels_of_model(request.model)
    if len(channels) > 1:
        _refuse_series(request, channels)
    with request.web.opened(request.scans, request.series, request.formats) as (scans, series):
        _predict_found(request, find_scans(scans, series, channels))


def _refuse_series(request: PredictRequest, channels: Sequence[str]) -> None:
    """Of a model of several channels: nothing says which series of a study is which channel."""
    if request.web.origin or request.series:
        raise DataError(
            "A model of several channels does not choose among DICOM series.",
            code="series-of-channels",
            where="--from" if request.web.origin else "--series",
            why=f"it takes {', '.join(channels)}, and nothing says which series is which channel",
            fix="Give the folder of each series: " + " ".join(f"{name}=FOLDER" for name in channels),
        )


def _predict_found(request: PredictRequest, found: Found) -> None:
    _refuse_overwriting(found.scans, request)
    check_volumes(request.out)
    loaded = load_model(request.model, choose_device(request.device, "--device"))
    loaded.organs_for(request.organs)  # refuse unknown names before anything is written
    request.out.mkdir(parents=True, exist_ok=True)
    view = _View(request.as_json)
    view.left_out(found)
    failures: list[DataError] = []
    segmented = 0
    with progress_bar("segmenting", len(found.scans), request.as_json) as advance:
        for scan in found.scans:
            try:
                shown = _predict_one(loaded, scan, request)
            except DataError as error:
                failures.append(error)
                continue
            finally:
                advance()
            segmented += "files" in shown
            view.result(scan, shown)
    if segmented:
        view.beside(request)
    _report_failures(failures, len(found.scans), segmented)


def _predict_one(model: Model, scan: Scan, request: PredictRequest) -> dict[str, Any]:
    """Write the label map, its names and volumes; a label map in a folder of scans is left out."""
    source = () if scan.channels else scan.slices or source_files(scan.path)
    check_source(request.formats, source)
    volume = scan.read() if scan.channels else read_scan(scan.path, source)
    doubts = (*scan.doubts, *model.doubts(volume, scan.modality))
    shown: dict[str, Any] = {"scan": request.web.place_of(scan.path)}
    if scan.channels:
        shown["channels"] = {channel.name: str(channel.path) for channel in scan.channels}
    if scan.series:
        series = scan.series
        shown["series"] = {"uid": series.uid, "number": series.number, "description": series.description}
    if scan.listed and any(doubt.code == LABELS for doubt in doubts):
        return {**shown, "skipped": LABELS, "doubts": [asdict(doubt) for doubt in doubts]}
    files, target = _targets(scan, request), _target(scan, request.out)
    replaced = [_replaced(file) for file in files.values() if file.exists()]
    name = scan.name if scan.channels else scan.path.resolve().name
    prediction = model.segment(volume, name, doubts, source, request.organs or None)
    if not request.web.origin:  # else it lay in a temporary folder
        prediction = replace(prediction, about={**prediction.about, **scan.place})
    side = prediction.save(target, request.formats)
    shown["volumes"] = str(add_volumes(request.out, target, scan.name, prediction))
    if request.preview:
        shown["preview"] = str(_write_preview(model, prediction, volume, target))
    request.web.store(files)
    found = [asdict(doubt) for doubt in (*prediction.doubts, *replaced)]
    shown["files"] = {name: str(file) for name, file in files.items()}
    if NIFTI in files:
        shown["labels"] = str(files[NIFTI])
    if request.web.to:
        shown["stored"] = request.web.to
    return {**shown, "names": str(side), "doubts": found}


def _write_preview(model: Model, prediction: Prediction, volume: Volume, target: Path) -> Path:
    from panorgan.report.preview import write_preview  # loads matplotlib

    return write_preview(prediction, volume, _picture(target), is_ct=model.plan.intensity == "window")


def _picture(target: Path) -> Path:
    return target.with_name(target.name.removesuffix(".nii.gz") + ".png")


class _View:
    """One line per scan on standard output; doubts on the error output, explained once each."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._explained: set[str] = set()
        self._words = Console(stderr=True, soft_wrap=True, highlight=False)

    def left_out(self, found: Found) -> None:
        """DICOM files that are no CT or MR series."""
        for folder, own in found.left_out.items():
            if self.as_json:
                print(json.dumps({"folder": str(folder), "left_out": own}), flush=True)
            else:
                counts = ", ".join(f"{count} {what}" for what, count in own.items())
                self._words.print(f"{folder}: skipped {counts}", markup=False)

    def result(self, scan: Scan, shown: dict[str, Any]) -> None:
        """What became of a scan."""
        if self.as_json:
            print(json.dumps(shown), flush=True)
            return
        if "files" in shown:
            written = ", ".join(filter(None, [*shown["files"].values(), shown.get("stored")]))
            Console(soft_wrap=True).print(f"{scan.name} → {written}", markup=False, highlight=False)
        sys.stdout.flush()
        for doubt in shown["doubts"]:
            self._doubt(scan.name, Problem(**doubt), left_out="skipped" in shown)

    def beside(self, request: PredictRequest) -> None:
        """What else was written, and how to look at it."""
        if self.as_json:
            return
        picture = ", a picture (.png)" if request.preview else ""
        words = f"Beside each: names, volumes and doubts (.json){picture}; volumes of all scans: {VOLUMES}."
        self._words.print(f"{words}\nView them: panorgan view {shlex.quote(str(request.out))}", markup=False)

    def _doubt(self, name: str, doubt: Problem, left_out: bool) -> None:
        end = " Skipped." if left_out else ""
        self._words.print(f"  doubt: {name}: {doubt.what}{end} [{doubt.code}]", markup=False, style="yellow")
        if doubt.code not in self._explained:
            self._explained.add(doubt.code)
            for label, text in (("why", doubt.why), ("fix", doubt.fix)):
                self._words.print(f"    {label}: {text}", markup=False)


def _report_failures(failures: Sequence[DataError], scans: int, segmented: int) -> None:
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise DataError(
            f"{len(failures)} of {scans} scans could not be segmented.",
            code="scans-failed",
            where="\n".join(error.where for error in failures),
            why="\n".join(error.what for error in failures),
            fix=failures[0].fix,
        )
    if not segmented:
        raise DataError(
            "There is no scan to segment.",
            code="only-label-maps",
            why=f"all {scans} files look like label maps",
            fix="Give the folder of the scans (of an nnU-Net folder: imagesTs or imagesTr).",
        )


def _refuse_overwriting(scans: Sequence[Scan], request: PredictRequest) -> None:
    """Neither a scan (in its own folder a label map would have its name) nor what predict has not written."""
    given = {path.resolve() for scan in scans for path in (scan.path, *(c.path for c in scan.channels))}
    targets = [(scan, target) for scan in scans for target in _written(scan, request)]
    for scan, target in targets:
        if target.resolve() in given:
            raise DataError(
                "A label map would overwrite a scan.",
                code="overwrites-scan",
                where=str(target),
                why="--out is the folder of the scans",
                fix="Choose another folder with --out.",
            )
        if target.exists() and not _is_prediction(_target(scan, request.out)):
            raise DataError(
                "A prediction would overwrite another file.",
                code="overwrites-file",
                where=str(target),
                why=f"{scan.name}.json next to it does not say that panorgan predicted it",
                fix="Choose another folder with --out, or move the file away.",
            )


def _is_prediction(target: Path) -> bool:
    """Whether the file next to a label map says which model made it."""
    try:
        about = json.loads(side_file(target).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and {"model", "labels"} <= about.keys()


def _replaced(target: Path) -> Problem:
    return Problem(
        "output-replaced",
        "An earlier label map was replaced.",
        f"{target} was there",
        "Choose another folder with --out to keep both.",
    )


def _targets(scan: Scan, request: PredictRequest) -> dict[str, Path]:
    """The file of every format."""
    return output_files(_target(scan, request.out), request.formats)


def _written(scan: Scan, request: PredictRequest) -> list[Path]:
    """All files that predict writes for a scan, but for the one next to them that says so."""
    pictures = [_picture(_target(scan, request.out))] if request.preview else []
    return [*_targets(scan, request).values(), *pictures]


def _target(scan: Scan, out: Path) -> Path:
    return out / f"{scan.name}.nii.gz"
