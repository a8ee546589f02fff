"""What a site says about a model, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.federation.scores import ValidationScores
from panorgan.federation.validation import validation_scores
from panorgan.networks import SegmentationNetwork


class Network(SegmentationNetwork):
    """Nothing to learn: the cases' own voxels say what is predicted."""

    def __init__(self) -> None:
        super().__init__(Vocabulary(["liver", "spleen"]), "softmax")
        self.weight = nn.Parameter(torch.zeros(1))


@dataclass
class Case:
    """A row of voxels whose values are the channel that is predicted there; `annotated` says where a structure is."""

    predicted: list[int]
    annotated: dict[str, list[int]]
    spacing: tuple[float, float, float]

    @property
    def image(self) -> Any:
        return np.asarray(self.predicted, dtype=np.float16).reshape(1, 1, -1)

    def masks(self) -> Any:
        for name, row in self.annotated.items():
            yield name, np.asarray(row, dtype=bool).reshape(1, 1, -1)


def predict(network: SegmentationNetwork, image: torch.Tensor) -> torch.Tensor:
    return nn.functional.one_hot(image.long(), 3).permute(3, 0, 1, 2).float()


LARGE = Case([1, 1, 1, 1, 2, 0], {"liver": [1, 1, 0, 0, 0, 0]}, (1.0, 2.0, 4.0))
"""4 of 2 liver voxels, each 8 mm³. Of the spleen it says nothing."""
SMALL = Case([1, 0, 2, 2, 0, 0], {"liver": [1, 1, 1, 0, 0, 0], "spleen": [0, 0, 0, 0, 0, 0]}, (1.0, 1.0, 1.0))
"""1 of 3 liver voxels, each 1 mm³; and 2 voxels of a spleen that is not there."""
WITH_SPLEEN = Case([2, 0, 0, 0, 0, 0], {"spleen": [1, 1, 1, 1, 0, 0]}, (1.0, 1.0, 2.0))
"""1 of 4 spleen voxels, each 2 mm³."""


def test_the_ratio_is_that_of_all_cases_together_in_mm3() -> None:
    """Liver (32 + 1) / (16 + 3), where voxels alone would give 5 / 5 and the mean of two ratios 7 / 6."""
    scores = validation_scores(Network(), [LARGE, SMALL], predict)
    assert scores.volume == {"liver": 33 / 19}
    assert scores.dice == {"liver": (4 / 6 + 2 / 4) / 2, "spleen": 0.0}


def test_a_case_without_the_organ_does_not_divide_by_zero() -> None:
    """Spleen (2 + 2) / (0 + 8): what is found where there is none counts, over what there is elsewhere."""
    assert validation_scores(Network(), [SMALL, WITH_SPLEEN], predict).volume["spleen"] == 4 / 8


def test_an_organ_that_no_case_shows_has_no_ratio() -> None:
    assert set(validation_scores(Network(), [SMALL], predict).volume) == {"liver"}
    assert validation_scores(Network(), [], predict) == ValidationScores({}, {})


def test_numbers_of_a_message_there_and_back() -> None:
    scores = ValidationScores({"liver": 0.5}, {"liver": 1.5, "spleen": 0.0})
    assert scores.numbers() == {"dice/liver": 0.5, "volume/liver": 1.5, "volume/spleen": 0.0}
    assert ValidationScores.from_numbers({**scores.numbers(), "cases": 3.0}) == scores
