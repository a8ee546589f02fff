"""Predict and score the test cases: one row per case and organ, in 3D and millimetres, on the scan's own grid."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from panorgan.data.case import Case
from panorgan.data.labels import labelled_organs
from panorgan.data.volume import Volume, write_labels
from panorgan.evaluation.forgetting import GLOBAL_MODEL
from panorgan.evaluation.inference import predict_organs, structure_mask
from panorgan.evaluation.metrics import score
from panorgan.federation.local_models import load_weights
from panorgan.workflows.model_bundle import Model
from panorgan.workflows.prepare import PreparedFederation
from panorgan.workflows.tables import Row


@dataclass(frozen=True)
class FederationScores:
    """`rows` of the delivered model; `own_models` of every site's own one (with a `model` column), where there are any.

    `split` is `test` within the federation, `external` outside.
    """

    rows: list[Row]
    own_models: list[Row]


def score_federation(
    model: Model,
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
    model: Model,
    delivered: Sequence[Row],
    files: Mapping[str, Path],
    prepared: PreparedFederation,
    on_case: Callable[[str, int, int], None] | None = None,
) -> list[Row]:
    """Rows of every site's model before it was averaged, and of the averaged one, on all test cases.

    Every organ is scored by itself: what a model has forgotten must not hide what it knows. Where that makes no
    difference and the delivered model is the averaged one, the `delivered` rows are reused.
    """
    same = model.network.activation == "softmax" and _is_delivered(model, files[GLOBAL_MODEL])
    known = {GLOBAL_MODEL: delivered} if same else {}
    network = copy.deepcopy(model.network)
    local = replace(model, network=network, taught=None)  # every organ is scored: that is the question
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


def _is_delivered(model: Model, file: Path) -> bool:
    delivered = model.network.state_dict()
    return all(torch.equal(value, delivered[key].cpu()) for key, value in load_weights(file).items())


def score_case(model: Model, case: Case, split: str, predictions: Path | None) -> list[Row]:
    """One row per annotated structure of the case that the model knows."""
    volume = case.read_image()
    labels = model.label_map(volume)
    if predictions is not None:
        path = predictions / case.site / f"{case.id}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_labels(path, labels, volume.affine)
    vocabulary = model.network.vocabulary
    return _rows(model, case, volume, split, lambda structure: structure_mask(labels, structure, vocabulary))


def score_case_by_organ(model: Model, case: Case, split: str) -> list[Row]:
    """The same with every organ by itself: an organ that a model predicts everywhere does not hide the others."""
    volume = case.read_image()
    organs = predict_organs(model.network, volume, model.plan, model.inference, model.postprocess)
    vocabulary = model.network.vocabulary

    def predicted(structure: str) -> NDArray[np.bool_]:
        (row,) = labelled_organs((structure,), vocabulary)
        return np.any([organs[organ] for organ, shows in zip(vocabulary, row, strict=True) if shows], axis=0)

    return _rows(model, case, volume, split, predicted)


def _rows(
    model: Model,
    case: Case,
    volume: Volume,
    split: str,
    predicted: Callable[[str], NDArray[np.bool_]],
) -> list[Row]:
    rows = []
    for structure, truth in case.iter_masks(volume):
        if not model.can_show(structure):
            continue
        values = score(predicted(structure), truth, volume.spacing)
        rows.append({"split": split, "site": case.site, "case": case.id, "organ": structure, **values})
    return sorted(rows, key=lambda row: str(row["organ"]))
