"""What a path is: a run, a comparison, a prediction, the page of the doctor, a folder of scans, or a scan."""

from __future__ import annotations

from pathlib import Path

from panorgan.anatomy.catalogue import add_organs
from panorgan.errors import DataError
from panorgan.viewer.of_doctor import PAGE as DOCTOR_PAGE
from panorgan.viewer.of_doctor import has_findings, view_checkup
from panorgan.viewer.of_files import prediction_files, view_folder, view_predictions, view_scan
from panorgan.viewer.other_process import in_another_process
from panorgan.viewer.study import Study
from panorgan.workflows.scans_to_segment import ENDINGS

_PAGES = ("report.html", "comparison.html", "ablation.html")


def open_study(path: Path, scan: Path | None = None, layout: str = "auto") -> Study:
    """Find out what a path is, by what lies there.

    Parameters
    ----------
    scan : the scan of a prediction, or the folder that holds the scans, where these have moved.
    layout : of a data folder; detected by default.
    """
    if not path.exists():
        raise DataError("There is nothing to show.", code="nothing-to-show", where=str(path), fix="Check the path.")
    if has_findings(path):
        return view_checkup(path)
    if path.is_file() and path.name in _PAGES:
        path = path.parent
    if path.is_dir() and (study := _of_runs(path)):
        return study
    if predictions := prediction_files(path):
        return view_predictions(predictions, scan)
    if path.is_dir() and layout == "auto" and has_findings(path / DOCTOR_PAGE):
        return view_checkup(path / DOCTOR_PAGE)
    if path.is_dir():
        return view_folder(path, layout)
    if path.name.endswith(ENDINGS):
        return view_scan(path)
    raise DataError(
        "This is nothing that the viewer can show.",
        code="nothing-to-show",
        where=str(path),
        fix="Point to a run, a comparison, a prediction, doctor.html, a folder of scans or a scan.",
    )


def _of_runs(folder: Path) -> Study | None:
    """A run or a comparison, read elsewhere: the rooms that train take half a gigabyte, which the server spares."""
    if (folder / "manifest.json").is_file():
        study = in_another_process(_view_run, folder)
    elif any((folder / name).is_file() for name in _PAGES[1:]):
        study = in_another_process(_view_comparison, folder)
    else:
        return None
    add_organs(study.added)
    return study


def _view_run(folder: Path) -> Study:
    from panorgan.viewer.of_run import view_run

    return view_run(folder)


def _view_comparison(folder: Path) -> Study:
    from panorgan.viewer.of_run import view_comparison

    return view_comparison(folder)
