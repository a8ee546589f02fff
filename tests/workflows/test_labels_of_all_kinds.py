"""Overlapping label sets, unions, tumours and both activations, through a whole run."""

from __future__ import annotations

import pytest

from panorgan.workflows.execute import train
from panorgan.workflows.prepare import prepare

SITES = [
    {"name": "a", "annotated": ["liver", "liver_tumour", "spleen"], "cases": 3, "spacing_mm": [12, 12, 12]},
    {"name": "b", "annotated": ["liver", "kidney"], "cases": 3, "spacing_mm": [12, 12, 12]},
    {"name": "c", "annotated": ["kidney_left", "kidney_right"], "cases": 3, "spacing_mm": [12, 12, 12]},
    {"name": "d", "annotated": ["spleen", "liver"], "cases": 3, "spacing_mm": [12, 12, 12]},
]
VOCABULARY = ["liver", "liver_tumour", "spleen", "kidney_left", "kidney_right"]


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("method", ["fedavg", "solo", "central_full"])
def test_a_federation_with_every_kind_of_label(tiny, tmp_path, activation, method):
    experiment = tiny(
        vocabulary=VOCABULARY,
        phantom={"sites": SITES, "tumours": True},
        network={"activation": activation},
        method={"name": method},
        training={"rounds": 2, "validate_every": 1},
    )
    result = train(experiment, tmp_path / "run")
    assert {row["organ"] for row in result.scores} == set(VOCABULARY)
    assert {row["site"] for row in result.scores} == {"a", "b", "c", "d"}


def test_a_tumour_lies_inside_its_organ_in_the_store(tiny):
    experiment = tiny(vocabulary=VOCABULARY, phantom={"sites": SITES, "tumours": True})
    (site,) = [site for site in prepare(experiment).sites if site.name == "a"]
    seen = 0
    for case in site.train:
        masks = dict(case.masks())
        inside = masks["liver_tumour"]
        seen += int(inside.sum())
        assert (masks["liver"] | ~inside).all()
    assert seen > 0
