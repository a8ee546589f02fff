"""Methods put together from pieces: rows with words, a new method as one row, pieces that leave others alone."""

from __future__ import annotations

from typing import Any

import pytest
from federations import run, same
from refusing import refused

from panorgan.errors import ConfigError
from panorgan.methods import registry
from panorgan.methods.about.metadata import describe
from panorgan.methods.presets import ASAM, CONTROL_VARIATES, PRESETS, PROXIMAL, PSEUDO_LABELS, SWA
from panorgan.methods.registry import methods
from panorgan.methods.shared.composition import Preset, compose, register_preset

WORDS: dict[str, str] = {"title": "New", "description": "a test.", "summary": "A test.", "paper": "none"}


@pytest.fixture
def added(monkeypatch):
    """Registers a preset for one test, as `new`."""
    monkeypatch.setattr(registry, "_registered", dict(methods()))
    return lambda **parts: register_preset(Preset("new", **WORDS, **parts), __name__)


def trained(tiny, folder, method: dict[str, Any], **training: Any):
    return run(tiny(method=method, training={"validate_every": 0, **training}), folder)


def test_every_row_has_a_name_of_its_own_and_words():
    assert len({preset.name for preset in PRESETS}) == len(PRESETS)
    for preset in PRESETS:
        described = describe(methods()[preset.name])
        assert (described.title, described.summary, described.paper) == (preset.title, preset.summary, preset.paper)
        assert described.text == preset.description


def test_no_preset_has_a_config_class_of_its_own():
    """Nothing but its pieces' settings."""
    for preset in PRESETS:
        config = methods()[preset.name].Config
        assert set(config.model_fields) == {
            name for piece in preset.pieces if piece.settings for name in piece.settings.model_fields
        }


def test_settings_of_all_pieces_stand_beside_each_other(added):
    config = added(supervision=PSEUDO_LABELS, local_step=ASAM, average=SWA).Config()
    assert (config.rho, config.swa_cycle, config.pretrain, config.organ_parts) == (0.7, 2, 1.0, "everyone")
    with pytest.raises(ValueError, match="rho"):
        type(config)(rho=-1)
    with pytest.raises(ValueError, match="mu"):
        type(config)(mu=0.1)


def test_what_leaves_a_site_is_what_all_pieces_send(added):
    method = added(supervision=PSEUDO_LABELS, local_step=CONTROL_VARIATES)
    assert set(method.tensors) == {"teacher/*", "control/*"}
    assert set(method.numbers) == {"loss", "cases", "volume_ml/*"}


def test_a_supervision_that_needs_channels_has_no_heads():
    with refused("preset-impossible", ConfigError):
        compose(Preset("new", **WORDS, supervision=PSEUDO_LABELS, organs="heads"), __name__)


def test_fedprox_with_heads_is_one_row(added, tiny, tmp_path):
    added(local_step=PROXIMAL, organs="heads")
    plain = trained(tiny, tmp_path / "plain", {"name": "multihead", "unlabelled": "marginal"})
    assert same(trained(tiny, tmp_path / "mu0", {"name": "new", "mu": 0}).state.weights, plain.state.weights)
    held = trained(tiny, tmp_path / "mu1", {"name": "new", "mu": 1}).state.weights
    assert held.keys() == plain.state.weights.keys()
    assert not same(held, plain.state.weights)


def test_control_variates_on_pseudo_labels_leave_teachers_and_the_first_round_alone(added, tiny, tmp_path):
    """All c are 0 then. In the second round they are felt."""
    added(supervision=PSEUDO_LABELS, local_step=CONTROL_VARIATES)
    for rounds in (1, 2):
        folder = tmp_path / str(rounds)
        plain = trained(tiny, folder / "plain", {"name": "fedavg_pl"}, rounds=rounds)
        other = trained(tiny, folder / "other", {"name": "new"}, rounds=rounds)
        for teacher in ("teacher/north", "teacher/south"):
            assert same(other.tensor_store.get(teacher), plain.tensor_store.get(teacher))
        assert same(other.state.weights, plain.state.weights) == (rounds == 1)


@pytest.mark.parametrize("stop", [1, 3, 4], ids=["in pretrain", "after the exchange", "in training"])
def test_pieces_keep_their_states_beside_each_other(added, tiny, tmp_path, stop):
    """Stopped and resumed, the run ends in the same bits: teachers, control variates and the mean over rounds."""
    added(supervision=PSEUDO_LABELS, local_step=CONTROL_VARIATES, average=SWA)
    training = {"validate_every": 0, "rounds": 3, "local_steps": 1}
    experiment = tiny(method={"name": "new", "pretrain": 0.6, "swa_start": 0.3, "swa_cycle": 1}, training=training)
    whole = run(experiment, tmp_path / "whole")
    run(experiment, tmp_path / "resumed", rounds=stop)
    resumed = run(experiment, tmp_path / "resumed")
    assert resumed.finished
    assert same(resumed.state.weights, whole.state.weights)
    assert same(resumed.delivered_weights()[1], whole.delivered_weights()[1])
    assert not same(whole.delivered_weights()[1], whole.state.weights)
