"""`panorgan predict`: scans in, label maps on their own grids out."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from panorgan import Model, load_model
from panorgan.cli.console import Console
from panorgan.data_doctor.files import Problem
from panorgan.errors import DataError
from panorgan.workflows.device import choose_device
from panorgan.workflows.input_doubts import LABELS
from panorgan.workflows.model_bundle import channels_of_model
from panorgan.workflows.scans_to_segment import Found, Scan, find_scans


@dataclass(frozen=True)
class PredictRequest:
    """The options of the command line. `series` chooses among DICOM series; all if empty."""

    model: Path
    scans: Sequence[Path]
    out: Path
    device: str = "auto"
    series: Sequence[str] = ()
    as_json: bool = False


def predict_scans(request: PredictRequest) -> None:
    """Predict every readable scan, then fail for the others; nothing is written for them."""
    # What is wrong with the scans shows before a model is loaded.
    found = find_scans(request.scans, request.series, channels_of_model(request.model))
    _refuse_overwriting(found.scans, request.out)
    loaded = load_model(request.model, choose_device(request.device, "--device"))
    request.out.mkdir(parents=True, exist_ok=True)
    view = _View(request.as_json)
    view.left_out(found)
    failures: list[DataError] = []
    segmented = 0
    for scan in found.scans:
        try:
            shown = _predict_one(loaded, scan, request.out)
        except DataError as error:
            failures.append(error)
            continue
        segmented += "labels" in shown
        view.result(scan, shown)
    _report_failures(failures, len(found.scans), segmented)


def _predict_one(model: Model, scan: Scan, out: Path) -> dict[str, Any]:
    """Write the label map and its names; a label map in a folder of scans is left out."""
    volume = scan.read()
    doubts = (*scan.doubts, *model.doubts(volume, scan.modality))
    shown: dict[str, Any] = {"scan": str(scan.path)}
    if scan.channels:
        shown["channels"] = {channel.name: str(channel.path) for channel in scan.channels}
    if scan.series:
        series = scan.series
        shown["series"] = {"uid": series.uid, "number": series.number, "description": series.description}
    if scan.listed and any(doubt.code == LABELS for doubt in doubts):
        return {**shown, "skipped": LABELS, "doubts": [asdict(doubt) for doubt in doubts]}
    target = _target(scan, out)
    replaced = (_replaced(target),) if target.exists() else ()
    prediction = model.segment(volume, scan.name if scan.channels else scan.path.resolve().name, doubts)
    side = prediction.save(target)
    found = [asdict(doubt) for doubt in (*prediction.doubts, *replaced)]
    return {**shown, "labels": str(target), "names": str(side), "doubts": found}


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
                self._words.print(f"{folder}: left out {counts}", markup=False)

    def result(self, scan: Scan, shown: dict[str, Any]) -> None:
        """What became of a scan."""
        if self.as_json:
            print(json.dumps(shown), flush=True)
            return
        if "labels" in shown:
            Console(soft_wrap=True).print(f"{scan.name} → {shown['labels']}", markup=False, highlight=False)
        sys.stdout.flush()
        for doubt in shown["doubts"]:
            self._doubt(scan.name, Problem(**doubt), left_out="skipped" in shown)

    def _doubt(self, name: str, doubt: Problem, left_out: bool) -> None:
        end = " It is left out." if left_out else ""
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


def _refuse_overwriting(scans: Sequence[Scan], out: Path) -> None:
    """Neither a scan (in its own folder a label map would have its name) nor what predict has not written."""
    given = {path.resolve() for scan in scans for path in (scan.path, *(c.path for c in scan.channels))}
    for scan in scans:
        target = _target(scan, out)
        if target.resolve() in given:
            raise DataError(
                "A label map would overwrite a scan.",
                code="overwrites-scan",
                where=str(target),
                why="--out is the folder of the scans",
                fix="Choose another folder with --out.",
            )
        if target.exists() and not _is_prediction(target):
            raise DataError(
                "A label map would overwrite another file.",
                code="overwrites-file",
                where=str(target),
                why=f"{scan.name}.json beside it does not say that panorgan predicted it",
                fix="Choose another folder with --out, or move the file away.",
            )


def _is_prediction(target: Path) -> bool:
    """Whether the file beside a label map says which model made it."""
    try:
        about = json.loads(target.with_name(target.name.removesuffix(".nii.gz") + ".json").read_text("utf-8"))
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


def _target(scan: Scan, out: Path) -> Path:
    return out / f"{scan.name}.nii.gz"
