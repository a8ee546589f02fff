"""Methods without what they add, or with every organ annotated, are simpler methods: whole runs, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from federations import ALL, run, same

PARTIAL = (["liver"], ["spleen", "kidney"])
WHOLE = (ALL, ALL)
FEDAVG = {"name": "fedavg"}
MARGINAL = {"name": "fedavg", "unlabelled": "marginal"}
FEDAVGM = {"name": "fedavgm", "unlabelled": "marginal"}
EQUAL: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[list[str], ...]]] = {
    "moon without its loss": ({"name": "moon", "mu": 0}, FEDAVG, PARTIAL),
    "tal is the plain mean of marginal losses": (
        {"name": "tal"},
        {**MARGINAL, "organ_parts": "everyone", "server_step": 1},
        PARTIAL,
    ),
    "meloss without exclusion": ({"name": "meloss", "exclusion_weight": 0}, {"name": "tal"}, PARTIAL),
    "meloss, all annotated": ({"name": "meloss"}, {"name": "tal"}, WHOLE),
    "condist without distillation": ({"name": "condist", "first_weight": 0, "last_weight": 0}, FEDAVGM, PARTIAL),
    "condist, all annotated": ({"name": "condist"}, FEDAVGM, WHOLE),
    "mean teacher without teacher and noise": (
        {"name": "mean_teacher", "consistency": 0, "noise": 0},
        MARGINAL,
        PARTIAL,
    ),
    "mean teacher, all annotated": ({"name": "mean_teacher"}, FEDAVG, WHOLE),
}
DIFFERENT = {
    "moon": ({"name": "moon"}, FEDAVG, PARTIAL),
    "meloss": ({"name": "meloss"}, {"name": "tal"}, PARTIAL),
    "condist": ({"name": "condist"}, FEDAVGM, PARTIAL),
    "mean teacher": ({"name": "mean_teacher"}, MARGINAL, PARTIAL),
}


@pytest.fixture(scope="module")
def weights(tiny, tmp_path_factory):
    """The weights after two rounds of two sites that annotate these organs; each run is made once."""
    made: dict[str, Any] = {}
    folder = tmp_path_factory.mktemp("reductions")

    def train(method: dict[str, Any], annotated: tuple[list[str], ...]):
        key = f"{method} {annotated}"
        if key not in made:
            sites = [
                {"name": name, "annotated": organs, "cases": 3, "spacing_mm": [14, 14, 14]}
                for name, organs in zip(("north", "south"), annotated, strict=True)
            ]
            training = {"rounds": 2, "validate_every": 0, "local_steps": 2}
            experiment = tiny(method=method, training=training, phantom={"sites": sites})
            made[key] = dict(run(experiment, folder / str(len(made))).state.weights)
        return made[key]

    return train


@pytest.mark.parametrize("case", EQUAL)
def test_it_is_the_simpler_method_bit_for_bit(weights, case):
    reduced, simpler, annotated = EQUAL[case]
    assert same(weights(reduced, annotated), weights(simpler, annotated))


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_it_adds_is_felt(weights, case):
    method, simpler, annotated = DIFFERENT[case]
    assert not same(weights(method, annotated), weights(simpler, annotated))
