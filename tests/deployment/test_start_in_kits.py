"""A federation that starts from a model: the server's kit has it, a hospital's kit says which one it is."""

from __future__ import annotations

import shutil

import pytest
import yaml
from kit_making import federation

pytest.importorskip("nvflare", reason="the network extra is not installed")

from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.deployment.kit_files import load_agreed, load_coordinator_file
from panorgan.deployment.kits import make_kits
from panorgan.deployment.segment import _setup
from panorgan.errors import ConfigError, RunError
from panorgan.federation.start_settings import weights_hash
from panorgan.workflows.execute import train


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    return train(tiny(training={"rounds": 1}), tmp_path_factory.mktemp("first") / "run")


def test_the_server_has_the_model_and_the_sites_its_hash(tiny, finished, tmp_path):
    agreement = tiny(training={"start_from": str(finished.path)}).agreement()
    made = make_kits(federation(), agreement, tmp_path / "out")
    server = ServerKit(made.server)
    sha256 = weights_hash(finished.model_folder)
    assert weights_hash(server.start) == sha256
    for kit in (server, *(SiteKit(path) for path in made.sites.values())):
        there = yaml.safe_load(kit.experiment.read_text())["training"]["start_from"]
        assert there["sha256"] == sha256
        assert str(finished.path) not in kit.experiment.read_text()
        assert kit is server or not list(kit.path.rglob("model.safetensors"))
    assert all(sha256 in (path / "README.md").read_text() for path in made.sites.values())
    settings = load_coordinator_file(server)
    setup = _setup(server, load_agreed(server, settings.experiment_fingerprint), settings, "run")
    assert setup.start().vocabulary.organs == finished.vocabulary.organs
    (server.start / "model.safetensors").write_bytes(b"another")
    with pytest.raises(RunError) as raised:
        setup.start()
    assert raised.value.code == "start-changed"


def test_a_model_that_does_not_fit_makes_no_kit(tiny, finished, tmp_path):
    other = tiny(network={"features": [4, 8, 16]}, training={"start_from": str(finished.path)}).agreement()
    with pytest.raises(ConfigError) as raised:
        make_kits(federation(), other, tmp_path / "out")
    assert raised.value.code == "start-other-network"
    assert not (tmp_path / "out").exists()
    gone = tmp_path / "gone"
    shutil.copytree(finished.model_folder, gone)
    agreement = tiny(training={"start_from": str(gone)}).agreement()
    shutil.rmtree(gone)
    with pytest.raises(RunError) as raised:
        make_kits(federation(), agreement, tmp_path / "out")
    assert raised.value.code == "no-model"


def test_without_a_start_kits_are_as_ever(tiny, tmp_path):
    made = make_kits(federation(), tiny().agreement(), tmp_path / "out")
    assert not ServerKit(made.server).start.exists()
    assert "SHA-256 `" not in next(iter(made.sites.values())).joinpath("README.md").read_text()
