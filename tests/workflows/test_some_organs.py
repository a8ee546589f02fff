"""`organs`: only these are in the label map, and only their parts are computed."""

from __future__ import annotations

import numpy as np
import pytest
from made_models import ORGANS, make_model, write_scans
from refusing import refused

import panorgan
from panorgan.errors import AnatomyError
from panorgan.workflows.model_bundle import load_model

HEADS = {"method": {"name": "multihead"}, "network": {"organs": "heads"}}


@pytest.fixture(scope="module")
def scan(tmp_path_factory):
    return write_scans(tmp_path_factory.mktemp("scans") / "scans")[0]


def computed(model, monkeypatch):
    """The groups whose parts were computed since."""
    seen, original = set(), type(model.network).outputs

    def outputs(self, chosen, shared):
        seen.update(group for group, _ in chosen)
        return original(self, chosen, shared)

    monkeypatch.setattr(type(model.network), "outputs", outputs)
    return seen


def test_the_others_are_left_out_and_integers_stay(scan, tmp_path):
    model = load_model(make_model(tmp_path / "m"), "cpu")
    whole, some = model.predict(scan), model.predict(scan, organs=["spleen"])
    assert (whole.labels == 3).any()
    assert np.array_equal(some.labels, np.where(whole.labels == 3, 3, 0))
    assert some.names == {"spleen": 3}
    assert list(some.describe()["organs"]) == list(some.describe()["snomed"]) == ["spleen"]


def test_an_organ_brings_what_lies_inside_it(scan, tmp_path):
    model = load_model(make_model(tmp_path / "m"), "cpu")
    assert model.organs_for(["Liver"]) == ("liver", "liver_tumour")
    assert set(np.unique(model.predict(scan, organs=["liver"]).labels)) == {0, 1, 2}


def test_only_the_parts_of_these_organs_are_computed(scan, tmp_path, monkeypatch):
    model = load_model(make_model(tmp_path / "m", **HEADS), "cpu")
    seen = computed(model, monkeypatch)
    some = model.predict(scan, organs=["liver"])
    assert seen == {"liver"}
    seen.clear()
    whole = model.predict(scan)
    assert seen == {"liver", "spleen", "kidney_left"}
    # Where no other organ wins in the whole map, both are equal; elsewhere the organ that was asked for has the voxel.
    free = ~np.isin(whole.labels, [3, 4])
    assert (some.labels != 0).any()
    assert np.array_equal(some.labels[free], whole.labels[free])


def test_cleaning_sees_all_organs(scan, tmp_path, monkeypatch):
    model = load_model(make_model(tmp_path / "m", **HEADS, postprocess="flkd"), "cpu")
    seen = computed(model, monkeypatch)
    some = model.predict(scan, organs=["liver_tumour"])
    assert seen == {"liver", "spleen", "kidney_left"}
    whole = model.predict(scan)
    assert np.array_equal(some.labels, np.where(whole.labels == 2, 2, 0))


@pytest.mark.parametrize(("asked", "hint"), [("livr", "'liver'"), ("pancreas", ORGANS[0])])
def test_an_organ_that_the_model_does_not_know_is_refused(asked, hint, scan, tmp_path):
    folder = make_model(tmp_path / "m")
    with refused("organ-not-in-model", AnatomyError) as caught:
        panorgan.predict(folder, scan, device="cpu", organs=[asked])
    assert hint in caught.value.fix
