"""ONNX: the same decisions for every kind of network and any batch and size, and a file that explains itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from made_models import ORGANS, SMALL_TRANSFORMER, make_model

import panorgan
from panorgan.workflows.model_bundle import load_model

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")

SLICES = (12, 8, 1)
KINDS = {
    "channels": {"network": {"strides": ((1, 1, 1), (2, 2, 1)), "norm": "batch"}},
    "channels in 2D": {
        "network": {"dimensions": 2, "activation": "sigmoid", "weight_standardisation": True},
        "patch": SLICES,
    },
    "heads in 2D": {"method": {"name": "flkd"}, "network": {"dimensions": 2}, "patch": SLICES},
    "task blocks in 2D": {"method": {"name": "segviz"}, "network": {"dimensions": 2}, "patch": SLICES},
    "decoders in 2D": {"method": {"name": "multidecoder"}, "network": {"dimensions": 2}, "patch": SLICES},
    "encoders in 2D": {"method": {"name": "multiencoder"}, "network": {"dimensions": 2}, "patch": SLICES},
    "FedIOD's transformer": {"method": {"name": "fediod", **SMALL_TRANSFORMER}},
    "UFPS in 2D": {"method": {"name": "ufps"}, "network": {"dimensions": 2}, "patch": SLICES},
    "two channels": {"network": {"input_channels": 2}, "channels": ("t1", "t2")},
    "merged members in 2D": {"method": {"name": "solo"}, "network": {"dimensions": 2}, "patch": SLICES},
    **{
        f"{method} in 2D": {"method": {"name": method}, "network": {"dimensions": 2}, "patch": SLICES}
        for method in ("conddec", "dodnet", "fedcrld", "fedmenu", "med3d", "pipofan")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_decides_the_same_at_sizes_it_was_not_made_with(kind, tmp_path):
    folder = make_model(tmp_path / "model", **KINDS[kind])
    made = panorgan.export(folder, "onnx", tmp_path / "onnx")
    assert made.check["max_difference"] < 1e-5
    assert made.check["decided_otherwise"] == 0
    model = load_model(folder, "cpu")
    about = json.loads((made.folder / "model.json").read_text())
    session = onnxruntime.InferenceSession(made.folder / "model.onnx", providers=["CPUExecutionProvider"])
    divisors = list(about["input"]["divisible_by"].values())
    for batch, times in ((1, (3, 5, 7)), (4, (8, 2, 2))):
        size = [divisor * n for divisor, n in zip(divisors, times, strict=False)]
        image = torch.rand(batch, model.input_channels, *size, generator=torch.Generator().manual_seed(batch)) * 2 - 1
        (found,) = session.run(None, {"image": image.numpy()})
        with torch.no_grad():
            logits = model.network(image)
        wanted = (logits.softmax(1) if about["activation"] == "softmax" else logits.sigmoid()).numpy()
        assert np.abs(found - wanted).max() < 1e-5


def test_it_explains_itself(tmp_path):
    made = panorgan.export(make_model(tmp_path / "model"), "onnx", tmp_path / "onnx")
    about = json.loads((made.folder / "model.json").read_text())
    assert about["input"]["divisible_by"] == {"right": 2, "anterior": 2, "superior": 2}
    assert about["channels"] == ["background", *ORGANS]
    assert about["labels"] == {organ: place for place, organ in enumerate(ORGANS, start=1)}
    assert about["plan"]["window_hu"] == [-160, 240]
    assert about["check"] == {
        **made.check,
        "onnxruntime": about["check"]["onnxruntime"],
        "images": about["check"]["images"],
    }
    session = onnxruntime.InferenceSession(made.folder / "model.onnx", providers=["CPUExecutionProvider"])
    inside = session.get_modelmeta().custom_metadata_map
    assert json.loads(inside["organs"]) == list(ORGANS)
    assert json.loads(inside["plan"]) == about["plan"]
    (given,), (answer,) = session.get_inputs(), session.get_outputs()
    assert (given.name, answer.name) == ("image", "probabilities")
    assert all(isinstance(size, str) for size in (given.shape[0], *given.shape[2:]))
    assert (made.folder / "CARD.md").is_file()
