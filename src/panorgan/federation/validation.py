"""Scores of a network on a site's validation cases, on the prepared grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

import numpy as np
import torch

from panorgan.evaluation.inference import decide, structure_mask
from panorgan.evaluation.metrics import dice
from panorgan.federation.scores import ValidationScores
from panorgan.networks import SegmentationNetwork
from panorgan.preparation.store import StoredCase


def validation_scores(
    network: SegmentationNetwork,
    cases: Iterable[StoredCase],
    predict: Callable[[SegmentationNetwork, torch.Tensor], torch.Tensor],
    taught: Collection[str] | None = None,
) -> ValidationScores:
    """Mean Dice and pooled volume ratio per annotated structure.

    `predict(network, image)` of [X, Y, Z] or [C, X, Y, Z] gives probabilities [channels, X, Y, Z]. `taught`: the organs
    that the network was trained on. All other softmax channels then count as background, as for a teacher.
    """
    scores: dict[str, list[float]] = {}
    predicted_mm3: dict[str, float] = {}
    annotated_mm3: dict[str, float] = {}
    for case in cases:
        image = torch.from_numpy(np.asarray(case.image, dtype=np.float32))
        found = predict(network, image).cpu()
        if taught is not None and network.activation == "softmax":
            others = [place for place, name in enumerate(network.channels) if place > 0 and name not in taught]
            found[0] += found[others].sum(0)
            found[others] = 0.0
        labels = decide(list(found), network)
        voxel = math.prod(case.spacing)
        for structure, truth in case.masks():
            predicted = structure_mask(labels, structure, network.vocabulary)
            scores.setdefault(structure, []).append(dice(predicted, truth))
            _add(predicted_mm3, structure, voxel * int(np.count_nonzero(predicted)))
            _add(annotated_mm3, structure, voxel * int(np.count_nonzero(truth)))
    return ValidationScores(
        {name: sum(values) / len(values) for name, values in scores.items()},
        {name: predicted_mm3[name] / volume for name, volume in annotated_mm3.items() if volume > 0},
    )


def _add(volumes: dict[str, float], structure: str, volume: float) -> None:
    volumes[structure] = volumes.get(structure, 0.0) + volume
