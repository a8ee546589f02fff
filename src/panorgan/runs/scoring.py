"""Predict and score the test cases: one row per case and organ, in 3D and millimetres, on the scan's own grid."""

from __future__ import annotations

import copy
import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from panorgan.cases.case import Case
from panorgan.cases.labels import shown
from panorgan.cases.volume import Volume, write_labels
from panorgan.csv_cells import escaped_row, unescaped
from panorgan.errors import RunError
from panorgan.evaluation.forgetting import GLOBAL_MODEL
from panorgan.evaluation.inference import cleaned, predict_organs, predict_volume, structure_mask
from panorgan.evaluation.metrics import METRICS, score
from panorgan.federation.files import read_with_checksum, write_with_checksum
from panorgan.federation.local_models import load_weights
from panorgan.runs.delivered import DeliveredModel
from panorgan.runs.prepare import PreparedFederation

Row = dict[str, Any]


@dataclass(frozen=True)
class FederationScores:
    """`rows` of the delivered model; `own_models` of every site's own one (with a `model` column), where there are any.

    `split` is `test` within the federation, `external` outside.
    """

    rows: list[Row]
    own_models: list[Row]


def score_federation(
    model: DeliveredModel,
    prepared: PreparedFederation,
    predictions: Path | None = None,
    on_case: Callable[[str, int, int], None] | None = None,
) -> FederationScores:
    """Score every test case of every site."""
    rows: list[Row] = []
    own_rows: list[Row] = []
    todo = [(site, case) for site in prepared.sites for case in site.test]
    for done, (site, case) in enumerate(todo, start=1):
        split = "external" if site.external else "test"
        rows += score_case(model, case, split, predictions)
        for owner, own in model.own_models().items():
            own_rows += [{"model": owner, **row} for row in score_case(own, case, split, None)]
        if on_case:
            on_case(site.name, done, len(todo))
    return FederationScores(rows, own_rows)


def score_local_models(
    model: DeliveredModel,
    delivered: Sequence[Row],
    files: Mapping[str, Path],
    prepared: PreparedFederation,
    on_case: Callable[[str, int, int], None] | None = None,
) -> list[Row]:
    """Rows of every site's model before it was averaged, and of the averaged one, on all test cases.

    Organs are scored each by itself: what a model has forgotten must not hide what it knows. Where that makes no
    difference and the delivered model is the averaged one, the `delivered` rows serve.
    """
    same = model.network.convention == "exclusive" and _is_delivered(model, files[GLOBAL_MODEL])
    known = {GLOBAL_MODEL: delivered} if same else {}
    network = copy.deepcopy(model.network)
    local = replace(model, network=network, taught=None)  # asked for every organ: that is the question
    todo = [(name, site, case) for name in files if name not in known for site in prepared.sites for case in site.test]
    rows: dict[str, list[Row]] = {name: list(known.get(name, ())) for name in files}
    loaded = ""
    for done, (name, site, case) in enumerate(todo, start=1):
        if name != loaded:
            network.load_state_dict(load_weights(files[name]))
            loaded = name
        rows[name] += score_case_by_organ(local, case, "external" if site.external else "test")
        if on_case:
            on_case(f"{name} before averaging" if name != GLOBAL_MODEL else name, done, len(todo))
    return [{"model": name, **row} for name in files for row in rows[name]]


def _is_delivered(model: DeliveredModel, file: Path) -> bool:
    delivered = model.network.state_dict()
    return all(torch.equal(value, delivered[key].cpu()) for key, value in load_weights(file).items())


def score_case(model: DeliveredModel, case: Case, split: str, predictions: Path | None) -> list[Row]:
    """One row per annotated structure of the case that the model knows."""
    volume = case.read_image()
    labels = predict_labels(model, volume)
    if predictions is not None:
        path = predictions / case.site / f"{case.id}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_labels(path, labels, volume.affine)
    vocabulary = model.network.vocabulary
    return _rows(model, case, volume, split, lambda structure: structure_mask(labels, structure, vocabulary))


def score_case_by_organ(model: DeliveredModel, case: Case, split: str) -> list[Row]:
    """The same with every organ by itself: an organ that a model sees everywhere does not hide the others."""
    volume = case.read_image()
    organs = predict_organs(model.network, volume, model.plan, model.inference, model.postprocess)
    vocabulary = model.network.vocabulary

    def predicted(structure: str) -> NDArray[np.bool_]:
        (row,) = shown((structure,), vocabulary)
        return np.any([organs[organ] for organ, shows in zip(vocabulary, row, strict=True) if shows], axis=0)

    return _rows(model, case, volume, split, predicted)


def _rows(
    model: DeliveredModel,
    case: Case,
    volume: Volume,
    split: str,
    predicted: Callable[[str], NDArray[np.bool_]],
) -> list[Row]:
    rows = []
    for structure, truth in case.each_mask(volume):
        if not model.can_show(structure):
            continue
        values = score(predicted(structure), truth, volume.spacing)
        rows.append({"split": split, "site": case.site, "case": case.id, "organ": structure, **values})
    return sorted(rows, key=lambda row: str(row["organ"]))


def predict_labels(model: DeliveredModel, volume: Volume) -> NDArray[np.uint8]:
    """Label map on the scan's own grid, post-processed as the model asks."""
    labels = predict_volume(model.network, volume, model.plan, model.inference)
    return cleaned(labels, model.network.vocabulary, model.postprocess)


def columns(own_models: bool = False) -> tuple[str, ...]:
    """The columns of `metrics.csv`; scores of sites' `own_models` say first whose model it is."""
    return (*(("model",) if own_models else ()), "split", "site", "case", "organ", *METRICS)


def write_metrics(path: Path, rows: Iterable[Row], own_models: bool = False) -> None:
    """Write `metrics.csv`; floats in full precision, so equal runs give equal files."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns(own_models), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        plain = {name: repr(float(value)) if name in METRICS else value for name, value in row.items()}
        writer.writerow(escaped_row(plain))
    write_with_checksum(path, text.getvalue())


def read_metrics(path: Path) -> list[Row]:
    """The rows of a `metrics.csv`, metrics as floats."""
    if not path.is_file():
        raise RunError(
            "The run has no scores yet.",
            where=str(path),
            fix="Finish it with 'panorgan train --resume', or run 'panorgan evaluate'.",
        )
    try:
        return list(_parsed(csv.DictReader(io.StringIO(read_with_checksum(path), newline=""))))
    except ValueError as error:
        raise RunError(
            "The scores of a run are damaged.",
            where=str(path),
            why=str(error),
            fix="Score the model again with 'panorgan evaluate'.",
        ) from error


def _parsed(rows: Iterable[dict[str, str]]) -> Iterator[Row]:
    for row in rows:
        yield {name: float(value) if name in METRICS else unescaped(value) for name, value in row.items()}
