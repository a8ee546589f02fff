"""An nnU-Net model folder: the weights by its names, and what cannot be expressed is refused."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from made_models import ORGANS, make_model
from refusing import refused

import panorgan
from panorgan.errors import RunError
from panorgan.exporting.nnunet_model import network_weights
from panorgan.workflows.model_bundle import load_model

THICK = {"features": (4, 8, 12), "strides": ((1, 1, 1), (2, 2, 1), (2, 2, 2))}


def plain_conv_unet(weights, architecture, image):
    """nnU-Net's PlainConvUNet, read from its state dict: two convolutions per level, skips behind what comes up."""
    strides, kernels = architecture["strides"], architecture["kernel_sizes"]

    def convolved(x, prefix, kernel, stride):
        for place in range(2):
            start = f"{prefix}.{place}"
            weight, bias = weights[f"{start}.conv.weight"], weights[f"{start}.conv.bias"]
            x = F.conv3d(x, weight, bias, stride if place == 0 else 1, [k // 2 for k in kernel])
            x = F.instance_norm(x, weight=weights[f"{start}.norm.weight"], bias=weights[f"{start}.norm.bias"])
            x = F.leaky_relu(x, 0.01)
        return x

    levels, x = [], image
    for place, (kernel, stride) in enumerate(zip(kernels, strides, strict=True)):
        x = convolved(x, f"encoder.stages.{place}.0.convs", kernel, stride)
        levels.append(x)
    for place in range(len(strides) - 1):
        up = f"decoder.transpconvs.{place}"
        x = F.conv_transpose3d(x, weights[f"{up}.weight"], weights[f"{up}.bias"], strides[-1 - place])
        x = convolved(torch.cat((x, levels[-2 - place]), 1), f"decoder.stages.{place}.convs", kernels[-2 - place], 1)
    last = f"decoder.seg_layers.{len(strides) - 2}"
    return F.conv3d(x, weights[f"{last}.weight"], weights[f"{last}.bias"])


@pytest.mark.parametrize(
    "network", [{}, THICK, {"weight_standardisation": True}], ids=["plain", "thick", "standardised"]
)
def test_its_network_gives_the_same_logits(network, tmp_path):
    folder = make_model(tmp_path / "model", network=network)
    made = panorgan.export(folder, "nnunet", tmp_path / "nnunet")
    checkpoint = torch.load(made.folder / "fold_0" / "checkpoint_final.pth", weights_only=True)
    plans = json.loads((made.folder / "plans.json").read_text())
    architecture = plans["configurations"][checkpoint["init_args"]["configuration"]]["architecture"]["arch_kwargs"]
    image = torch.rand(2, 1, 16, 12, 8, generator=torch.Generator().manual_seed(1))
    network = load_model(folder, "cpu").network
    with torch.no_grad():
        found, wanted = plain_conv_unet(checkpoint["network_weights"], architecture, image), network(image)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_its_network_is_that_of_the_library(tmp_path):
    """Strictly: every key of the real class, and no other."""
    library = pytest.importorskip(
        "dynamic_network_architectures.architectures.unet", reason="needs dynamic_network_architectures"
    )
    folder = make_model(tmp_path / "model", network=THICK)
    network = load_model(folder, "cpu").network
    built = library.PlainConvUNet(
        1, 3, (4, 8, 12), torch.nn.Conv3d, [[3, 3, 1], [3, 3, 3], [3, 3, 3]], THICK["strides"], 2, 5, 2,
        conv_bias=True, norm_op=torch.nn.InstanceNorm3d, norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=torch.nn.LeakyReLU, nonlin_kwargs={"inplace": True},
    )  # fmt: skip
    built.load_state_dict(network_weights(network))
    image = torch.rand(1, 1, 16, 16, 8)
    with torch.no_grad():
        assert torch.equal(built.eval()(image), network(image))


def test_its_plans_repeat_the_preparation(tmp_path):
    model = make_model(tmp_path / "model", plan={"spacing_mm": (1, 2, 5)}, postprocess="pieces")
    made = panorgan.export(model, "nnunet", tmp_path / "nn")
    plans = json.loads((made.folder / "plans.json").read_text())
    numbers = plans["foreground_intensity_properties_per_channel"]["0"]
    # Clipped to the window, then (x - 40) / 200: -160 becomes -1 and 240 becomes 1.
    assert (numbers["percentile_00_5"], numbers["percentile_99_5"]) == (-160, 240)
    assert (numbers["mean"], numbers["std"]) == (40, 200)
    configuration = plans["configurations"]["3d_fullres"]
    assert configuration["spacing"] == [1, 2, 5]
    assert configuration["patch_size"] == [8, 8, 8]
    dataset = json.loads((made.folder / "dataset.json").read_text())
    assert dataset["labels"] == {"background": 0, **{organ: place for place, organ in enumerate(ORGANS, start=1)}}


@pytest.mark.parametrize(
    "kind",
    [
        {"method": {"name": "flkd"}},
        {"method": {"name": "solo"}},
        {"network": {"dimensions": 2}, "patch": (12, 8, 1)},
        {"network": {"activation": "sigmoid"}},
        {"network": {"norm": "batch"}},
        {"network": {"residual": True}},
        {"network": {"input_channels": 2}, "channels": ("t1", "t2")},
        {"plan": {"intensity": "zscore"}},
        {"postprocess": "ufps"},
    ],
    ids=str,
)
def test_what_nnunet_cannot_do_is_refused(kind, tmp_path):
    folder = make_model(tmp_path / "model", **kind)
    with refused("not-an-nnunet", RunError):
        panorgan.export(folder, "nnunet", tmp_path / "nnunet")
    assert not (tmp_path / "nnunet").exists()
