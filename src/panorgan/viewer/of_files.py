"""Predictions of `panorgan predict`, and folders of scans and labels in any layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from panorgan.anatomy import Vocabulary
from panorgan.data.case import LabelMap, MaskFiles, MaskSource
from panorgan.data.dicom_seg import SegmentMasks
from panorgan.data.layouts import AUTO, find_layout
from panorgan.data.layouts.base import FoundImage, FoundLabelMap, FoundLabels, FoundMasks
from panorgan.errors import DataError, PanorganError
from panorgan.viewer.study import Pane, Remark, Scan, Study, ViewedCase
from panorgan.workflows.scans_to_segment import ENDINGS, find_scans

_KEYS = ("scan", "model", "labels")
# Among many files of a folder, those of predict are small.
_LARGEST_JSON = 1 << 20


def prediction_files(path: Path) -> list[Path]:
    """The JSON files of predictions that a path means: one, that of a label map, or all of a folder."""
    if path.is_dir():
        return [file for file in sorted(path.glob("*.json")) if _described(file)]
    stem = next((path.name.removesuffix(ending) for ending in (*ENDINGS, ".json") if path.name.endswith(ending)), None)
    side = path.with_name(f"{stem}.json")
    return [side] if stem and _described(side) else []


def _described(file: Path) -> dict[str, Any] | None:
    """The content of a prediction's JSON file; None for any other file."""
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST_JSON:
            return None
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and all(key in content for key in _KEYS) else None


def view_predictions(files: Sequence[Path], scan: Path | None = None) -> Study:
    """Predicted label maps over their scans; `scan` is the scan, or the folder that the scans are in now."""
    cases = [_prediction(file, _described(file) or {}, scan) for file in files]
    title = files[0].stem if len(files) == 1 else files[0].parent.resolve().name
    organs = dict.fromkeys(name for case in cases for pane in case.panes for name in _structures(pane))
    return Study(title, "prediction", tuple(cases), None, tuple(organs))


def _structures(pane: Pane) -> tuple[str, ...]:
    return pane.labels.structures if pane.labels else ()


def _prediction(file: Path, about: Mapping[str, Any], scan: Path | None) -> ViewedCase:
    map_file = next((m for e in (".nii.gz", ".nii") if (m := file.with_name(file.stem + e)).is_file()), None)
    if map_file is None:
        raise DataError(
            "The label map of a prediction is missing.",
            code="label-missing",
            where=str(file),
            fix="Put it next to its JSON file, or predict the scan again.",
        )
    ids = {str(name): int(number) for name, number in about["labels"].items()}
    doubts = tuple(
        Remark(str(doubt.get("code", "")), "warning", f"{doubt.get('what', '')} – {doubt.get('why', '')}".strip(" –"))
        for doubt in about.get("doubts", ())
    )
    labels = LabelMap(map_file, _inclusive(ids), frozenset(ids.values()))
    pane = Pane("Prediction", _scan_of(about, map_file, scan), labels)
    return ViewedCase(file.stem, (pane,), note=f"model {about['model']}", remarks=doubts)


def _inclusive(ids: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The integers of every organ, those of what lies inside it included."""
    try:
        vocabulary = Vocabulary(tuple(ids))
        return {name: tuple(ids[member] for member in vocabulary.members(name)) for name in ids}
    except PanorganError:  # organs of another catalogue
        return {name: (number,) for name, number in ids.items()}


def _scan_of(about: Mapping[str, Any], map_file: Path, given: Path | None) -> Scan:
    """The scan of a label map: where its JSON file says, next to it, or where the user says."""
    name = str(about["scan"])
    noted = [Path(str(about["scan_path"]))] if about.get("scan_path") else []
    here = [map_file.parent / name, map_file.parent.parent / name]
    # The first of several channels has another name than its case.
    wanted = [given / name, *(given / path.name for path in noted), given] if given else [*noted, *here]
    uid = str(about.get("scan_series", ""))
    for path in wanted:
        if not path.exists() or path.samefile(map_file):  # a label map has the name of its scan
            continue
        slices = _series_files(path, uid) if path.is_dir() else ()
        if path.is_file() or slices:
            return Scan(path, slices)
    raise DataError(
        f"The scan of a prediction is not there: {name}.",
        code="scan-of-prediction-missing",
        where=str(map_file),
        why=f"looked for {', '.join(map(str, wanted))}",
        fix="Say where it is with --scan FILE (or the folder that holds it).",
    )


def _series_files(folder: Path, uid: str) -> tuple[Path, ...]:
    """The files of a DICOM series in a folder; of the one that was segmented, where there are several."""
    try:
        scans = [scan for scan in find_scans([folder]).scans if scan.series]
    except PanorganError:
        return ()
    fitting = [scan for scan in scans if scan.series and scan.series.uid == uid] if uid else scans
    return fitting[0].slices if len(fitting) == 1 else ()


def view_folder(folder: Path, layout: str = AUTO) -> Study:
    """The scans of a folder, with labels where there are some; a folder without a layout shows its files."""
    cases = folder_cases(folder, layout)
    return Study(folder.resolve().name, "folder", tuple(cases.values()))


def folder_cases(folder: Path, layout: str = AUTO, group: str = "") -> dict[str, ViewedCase]:
    """Every case of a folder by its name."""
    try:
        found = find_layout(folder, layout)
    except DataError as error:
        if error.code != "no-layout":
            raise
        return {scan.name: _loose(Scan(scan.path, scan.slices), scan.name) for scan in find_scans([folder]).scans}
    images, labels = found.images(folder), found.labels(folder)
    cases = {name: _case(name, image, labels.get(name), group) for name, image in sorted(images.items())}
    if not cases:
        raise DataError(
            "A data folder holds no scans.",
            code="no-scans",
            where=str(folder),
            why=f"it is laid out as {found.title}, but no scan is named as that asks",
            fix="'panorgan doctor' says more about it.",
        )
    return cases


def view_scan(path: Path) -> Study:
    """A single scan."""
    return Study(path.name, "folder", (_loose(Scan(path), path.name),))


def _loose(scan: Scan, name: str) -> ViewedCase:
    return ViewedCase(name, (Pane("Scan", scan),))


def _case(name: str, image: FoundImage, found: FoundLabels | None, group: str) -> ViewedCase:
    labels = _labels(found) if found is not None else None
    pane = Pane("Labels" if labels else "Scan", Scan(image.path, image.slices), labels)
    ct = None if not image.modality else image.modality == "CT"
    return ViewedCase(name, (pane,), group, ct=ct)


def _labels(found: FoundLabels) -> MaskSource | None:
    """Labels in the folder's own words: whatever is there is shown."""
    if isinstance(found, FoundLabelMap):
        ids = {name: tuple(own) for name, own in found.ids.items() if any(own)}
        declared = frozenset(i for own in found.ids.values() for i in own)
        return LabelMap(found.path, ids, declared) if ids and found.path.is_file() else None
    if isinstance(found, FoundMasks):
        files = {name: (path,) for name, path in found.files.items() if path.is_file()}
        return MaskFiles(files) if files else None
    return SegmentMasks(found.segments) if found.segments else None
