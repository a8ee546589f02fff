"""Analyses of a finished run: true to the model, repeatable, and clear about what they cannot do."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from panorgan.anatomy import Vocabulary
from panorgan.errors import ConfigError, DataError, RunError
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import UNetSettings
from panorgan.workflows import analyze as module
from panorgan.workflows.analysis_files import ALL_SITES, Analysis, PlaceCurvature, read_analysis
from panorgan.workflows.analyze import AnalysisSettings, analyze
from panorgan.workflows.execute import train
from panorgan.workflows.model_bundle import save_model
from panorgan.workflows.run import Run

QUICK = AnalysisSettings(eigenvalues=2, probes=3, grid=3, batches=2, batch_size=1, places=64)
# Patches of an analysis are those of training: small ones, of which many derivatives are taken.
SMALL = {"patch_size": [8, 8, 8]}
LAYERS_ONLY = AnalysisSettings(eigenvalues=0, probes=0, grid=0, batches=1, places=64)


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Path:
    """Two rounds of FedAvg, with the sites' models of the last one."""
    folder = tmp_path_factory.mktemp("analyze") / "run"
    train(tiny(training={"rounds": 2, "sampling": SMALL}, local_models=True), folder)
    return folder


@pytest.fixture(scope="module")
def analysis(finished) -> Analysis:
    return analyze(finished, QUICK, device="cpu")


@pytest.fixture
def again(finished, tmp_path) -> Path:
    """The same run in a folder of its own."""
    return Path(shutil.copytree(finished, tmp_path / "again"))


@pytest.fixture
def other_model(finished, tmp_path):
    """Make a model folder by another method or network, untrained; changes go into its card."""

    def make(method: str = "fedavg", network: dict | None = None, **changes) -> Path:
        card = json.loads((finished / "model" / "model.json").read_text())
        card["network"] = {**card["network"], **(network or {})}
        card |= {"method": {"name": method}, "run": f"made up {method} {changes} {network}", **changes}
        facts = {name: SiteInfo.from_json(name, site) for name, site in card["sites"].items()}
        kind = find_method(method)
        federation = Federation(Vocabulary(card["organs"]), facts)
        torch.manual_seed(3)
        made = kind(kind.Config()).build_network(UNetSettings(**card["network"]), federation)
        folder = tmp_path / f"{method}-{len(list(tmp_path.iterdir()))}"
        save_model(folder, made.state_dict(), card)
        return folder

    return make


def test_all_sites_are_the_mean_of_the_sites(analysis):
    whole, north, south = analysis.curvature
    assert [place.place for place in analysis.curvature] == [ALL_SITES, "north", "south"]
    assert whole.loss == pytest.approx((north.loss + south.loss) / 2)
    assert whole.trace == pytest.approx((north.trace + south.trace) / 2)
    assert whole.largest <= (north.largest + south.largest) / 2 * 1.001, "Weyl: λ_max of a mean is at most the mean"
    planes = analysis.landscape.losses
    np.testing.assert_allclose(planes[ALL_SITES], (np.array(planes["north"]) + np.array(planes["south"])) / 2)
    for place in analysis.curvature:
        assert place.eigenvalues[0] >= place.eigenvalues[1]
        assert place.gradient_norm > 0
        assert place.trace_standard_error > 0


def test_the_middle_of_the_landscape_is_the_loss(analysis):
    assert analysis.landscape.steps == (-1.0, 0.0, 1.0)
    for place in analysis.curvature:
        assert analysis.landscape.losses[place.place][1][1] == pytest.approx(place.loss, rel=1e-6)


def test_the_sites_models_before_averaging_are_compared(analysis):
    assert [(pair.other, pair.kind) for pair in analysis.similarity] == [("north", "local"), ("south", "local")]
    north = analysis.similarity[0]
    assert north.layers == ("encoder.0", "encoder.1", "bottleneck", "decoder.0", "decoder.1", "head")
    assert all(0.1 < value < 1 for value in north.same_layer)


def test_what_is_written_is_what_was_found(finished, analysis):
    run = Run(finished)
    assert read_analysis(run) == analysis
    with (run.analysis_folder / "hessian.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["eigenvalue_1"]) for row in rows] == [place.largest for place in analysis.curvature]
    with (run.analysis_folder / "landscape.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 9
    (corner,) = [r for r in rows if r["place"] == "north" and float(r["first"]) == 1 and float(r["second"]) == -1]
    assert float(corner["loss"]) == analysis.landscape.losses["north"][2][0]
    with (run.analysis_folder / "cka.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 36
    assert analysis.about["patches_per_site"] == 2
    assert analysis.about["settings"]["probes"] == 3


def test_it_gives_the_same_numbers_again_and_leaves_the_model_alone(finished, analysis, again):
    analyze(again, QUICK, device="cpu")
    for file in ("analysis.json", "analysis/hessian.csv", "model/model.safetensors"):
        assert (again / file).read_bytes() == (finished / file).read_bytes()
    other_patches = analyze(again, LAYERS_ONLY.model_copy(update={"seed": 1}), device="cpu")
    assert other_patches.curvature[0].loss != analysis.curvature[0].loss


def test_what_is_left_out_is_empty(again):
    shutil.rmtree(again / "local_models")
    found = analyze(again, LAYERS_ONLY, device="cpu")
    assert found.landscape is None
    assert found.similarity == ()
    assert all(place.eigenvalues == () and math.isnan(place.trace) for place in found.curvature)
    assert all(math.isfinite(place.loss) for place in found.curvature)
    assert {path.name for path in Run(again).analysis_folder.iterdir()} == {"hessian.csv"}
    assert math.isnan(read_analysis(Run(again)).curvature[0].trace)


def test_a_run_against_itself_is_the_same_in_every_layer(finished, again):
    pair = analyze(again, LAYERS_ONLY, [finished], device="cpu").similarity[0]
    assert (pair.other, pair.kind) == ("fedavg (tiny)", "run")
    np.testing.assert_allclose(pair.same_layer, 1.0)
    off = np.array(pair.cka)[~np.eye(len(pair.layers), dtype=bool)]
    assert off.max() < 1


def test_networks_of_other_methods_are_compared_as_far_as_they_share_layers(again, other_model):
    heads, solo = other_model("multihead"), other_model("solo")
    pair = analyze(again, LAYERS_ONLY, [heads], device="cpu").similarity[0]
    assert pair.layers == ("encoder.0", "encoder.1", "bottleneck", "decoder.0", "decoder.1")
    assert max(pair.same_layer) < 0.95
    with pytest.raises(RunError) as error:
        analyze(again, LAYERS_ONLY, [solo], device="cpu")
    assert error.value.code == "no-common-layer"
    assert "solo" in error.value.fix


def test_models_that_cannot_be_compared_are_refused_before_anything_is_computed(finished, other_model, monkeypatch):
    monkeypatch.setattr(module, "prepare", lambda *_: pytest.fail("too late"))
    with pytest.raises(RunError) as error:
        analyze(finished, LAYERS_ONLY, [other_model(network={"features": [4, 8]})], device="cpu")
    assert error.value.code == "other-levels"
    assert error.value.why.count("1×1×1 2×2×2 2×2×2") == 1
    assert error.value.why.count("1×1×1 2×2×2") == 2
    plan = json.loads((finished / "model" / "model.json").read_text())["plan"]
    plan["spacing_mm"] = [6.0, 6.0, 6.0]
    with pytest.raises(RunError) as caught:
        analyze(finished, LAYERS_ONLY, [other_model(plan=plan)], device="cpu")
    assert caught.value.code == "other-plan"
    with pytest.raises(ConfigError) as caught:
        analyze(finished, LAYERS_ONLY, [finished, finished], device="cpu")
    assert caught.value.code == "run-named-twice"
    with pytest.raises(RunError) as caught:
        analyze(finished, LAYERS_ONLY, [finished.parent], device="cpu")
    assert caught.value.code == "no-model"


def test_an_unfinished_run_is_refused(again, tmp_path):
    (again / "metrics.csv").unlink()
    with pytest.raises(RunError) as error:
        analyze(again, QUICK, device="cpu")
    assert error.value.code == "run-not-finished"
    assert "--resume" in error.value.fix
    with pytest.raises(RunError) as caught:
        analyze(tmp_path, QUICK, device="cpu")
    assert caught.value.code == "not-a-run"


def test_a_landscape_without_a_middle_is_refused(finished):
    with pytest.raises(ConfigError) as error:
        analyze(finished, AnalysisSettings(grid=4), device="cpu")
    assert error.value.code == "grid-even"
    assert "4" in error.value.what
    assert "5" in error.value.fix


def test_without_validation_cases_the_training_cases_are_offered(tiny, tmp_path):
    folder = tmp_path / "run"
    train(tiny(training={"rounds": 1}, splits={"validation": 0}), folder)
    with pytest.raises(DataError) as error:
        analyze(folder, LAYERS_ONLY, device="cpu")
    assert error.value.code == "split-empty"
    assert "--split train" in error.value.fix
    trained = analyze(folder, LAYERS_ONLY.model_copy(update={"split": "train"}), device="cpu")
    assert math.isfinite(trained.curvature[0].loss)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["solo", "flkd", "central_full"])
def test_every_kind_of_delivered_model_can_be_analysed(method, tiny, tmp_path):
    folder = tmp_path / "run"
    train(tiny(method={"name": method}, training={"rounds": 1, "sampling": SMALL}), folder)
    settings = QUICK.model_copy(update={"eigenvalues": 1, "probes": 1, "batches": 1, "grid": 0})
    found = analyze(folder, settings, device="cpu")
    assert all(place.largest > 0 for place in found.curvature)
    assert all(math.isnan(place.trace_standard_error) for place in found.curvature), "a single probe has no spread"


def test_not_enough_memory_names_a_way_out(finished, monkeypatch):
    def runs_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has")

    monkeypatch.setattr(module, "_curvature", runs_out)
    with pytest.raises(RunError) as error:
        analyze(finished, LAYERS_ONLY, device="cpu")
    assert error.value.code == "out-of-memory"
    assert "--batch-size 1" in error.value.fix


def test_a_damaged_file_is_named(tmp_path):
    run = Run(tmp_path)
    assert read_analysis(run) is None
    for text in ("{", "{}", '{"about": {}, "curvature": [{}], "landscape": null, "similarity": []}'):
        run.analysis_file.write_text(text)
        with pytest.raises(RunError) as error:
            read_analysis(run)
        assert error.value.code == "analysis-damaged"
        assert "panorgan analyze" in error.value.fix


def test_the_ratio_needs_five_positive_eigenvalues():
    def place(*values: float) -> PlaceCurvature:
        return PlaceCurvature("north", 1.0, 1.0, values, 1.0, 1.0)

    assert place(8.0, 4.0, 3.0, 2.5, 2.0).ratio == 4.0
    assert math.isnan(place(8.0, 4.0).ratio)
    assert math.isnan(place(8.0, 4.0, 3.0, 2.5, -1.0).ratio)
    assert math.isnan(place().largest)
