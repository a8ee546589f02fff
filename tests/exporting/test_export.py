"""`panorgan export`: what it refuses, and that nothing is left of what it refuses."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from invoking import invoke
from made_models import make_model
from refusing import refused

import panorgan
from panorgan.errors import ConfigError, RunError
from panorgan.exporting import check, monai_bundle
from panorgan.exporting.plain_network import PlainNetwork
from panorgan.workflows.model_bundle import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("made") / "model")


def test_another_form_is_refused_with_a_suggestion(folder):
    with refused("unknown-export", ConfigError) as caught:
        panorgan.export(folder, "onx")
    assert "'onnx'" in caught.value.fix


def test_a_folder_that_holds_something_is_refused(folder, tmp_path):
    (tmp_path / "mine").write_text("kept")
    with refused("folder-not-empty", RunError):
        panorgan.export(folder, "nnunet", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_export_that_differs_leaves_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(monai_bundle, "PlainNetwork", lambda network: Shifted(network))
    with refused("export-differs", RunError):
        panorgan.export(folder, "bundle", tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


class Shifted(PlainNetwork):
    def forward(self, image):
        return super().forward(image) + 2 * check.TOLERANCE


def test_a_network_that_no_converter_takes_is_an_error_with_a_code(folder, tmp_path, monkeypatch):
    class Fixed(PlainNetwork):
        def forward(self, image):
            nothing = torch.zeros(len(image), 0, *image.shape[2:])  # a trace keeps the number
            return torch.cat((super().forward(image), nothing), dim=1)

    monkeypatch.setattr(monai_bundle, "PlainNetwork", Fixed)
    with refused("network-not-exportable", RunError) as caught:
        panorgan.export(folder, "bundle", tmp_path / "bundle")
    assert caught.value.where == "--to bundle"
    assert list(tmp_path.iterdir()) == []


def test_other_decisions_are_counted():
    class Halves(torch.nn.Module):
        activation = "softmax"

        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Parameter(torch.zeros(1))

        def forward(self, image):
            return torch.cat((image, image * 0), dim=1)

    found = check.compare_networks(Halves(), lambda image: Halves()(image).softmax(1).flip(1), [])
    assert found == check.Agreement(0.0, 0, 0)
    tiny = 1e-5

    def nearly(image):
        # Where the image is almost zero the two channels are almost equal, and a small shift decides.
        return Halves()(image).softmax(1) + torch.tensor([tiny, -tiny]).view(1, 2, 1)

    found = check.compare_networks(Halves(), nearly, [(1, 1, 200_000)])
    expected = torch.rand((1, 1, 200_000), generator=torch.Generator().manual_seed(check._SEED)) * 2 - 1
    by_hand = int(((expected < 0) & (expected.sigmoid() + tiny > (-expected).sigmoid() - tiny)).sum())
    assert by_hand > 0
    assert abs(found.decided_otherwise - by_hand) <= 1
    assert found.max_difference == pytest.approx(tiny, rel=0.02)


def test_the_copy_leaves_the_model_as_it_is(tmp_path):
    model = load_model(
        make_model(tmp_path / "m", network={"weight_standardisation": True, "norm": "group", "groups": 4}), "cpu"
    )
    before = {key: value.clone() for key, value in model.network.state_dict().items()}
    image = torch.rand(1, 1, 8, 8, 8)
    with torch.no_grad():
        found, wanted = PlainNetwork(model.network)(image), model.network(image).softmax(1)
    assert torch.equal(found, wanted)
    assert all(torch.equal(before[key], value) for key, value in model.network.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.network.parameters())


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_says_where_it_is_and_how_it_agrees(folder, tmp_path, capfd, monkeypatch, as_json):
    arguments = (
        "export",
        str(folder),
        "--to",
        "bundle",
        "--out",
        str(tmp_path / "b"),
        *(["--json"] if as_json else []),
    )
    code, out, _ = invoke(capfd, monkeypatch, *arguments)
    assert code == 0
    assert str(tmp_path / "b") in out
    if as_json:
        assert json.loads(out)["check"]["decided_otherwise"] == 0
    else:
        assert "0 of 3072 voxels" in out  # windows of 8³, one, two and three of them
    assert (tmp_path / "b" / "LICENSE").is_file()


def test_without_the_extra_onnx_says_what_to_install(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with refused("onnx-missing", RunError) as caught:
        panorgan.export(folder, "onnx", tmp_path / "onnx")
    assert "[onnx]" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_a_run_keeps_its_exports(tmp_path):
    make_model(tmp_path / "model")
    assert panorgan.export(tmp_path, "nnunet").folder == tmp_path / "export" / "nnunet"
