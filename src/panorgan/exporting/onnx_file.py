"""An ONNX file with dynamic batch and space, checked with onnxruntime, and a JSON file that explains it."""

from __future__ import annotations

import json
import logging
import math
import warnings
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import panorgan
from panorgan.data.labels import CONVENTIONS
from panorgan.errors import RunError
from panorgan.evaluation.inference import label_ids
from panorgan.exporting.check import Agreement, compare_networks
from panorgan.exporting.plain_network import PlainNetwork
from panorgan.preparation.sampling import sliced_axis
from panorgan.workflows.model_bundle import Model

INPUT, OUTPUT = "image", "probabilities"
_AXES = ("right", "anterior", "superior")
_EMBEDDED = 1 << 30
"""Weights up to this many bytes lie inside the file, more go into a file next to it: a file holds 2 GB at most."""


def write_onnx(model: Model, folder: Path) -> Agreement:
    """Write `model.onnx` and `model.json` into an empty folder, and run the file on images of several sizes."""
    runtime = _onnxruntime()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    about = describe(model)
    program = _recorded(model)
    program.model.metadata_props.update({name: _text(value) for name, value in about.items()})
    weights = sum(p.numel() * p.element_size() for p in model.network.parameters())
    program.save(path, external_data=weights > _EMBEDDED)
    session = _session(runtime, path)
    shapes = _checked_shapes(model)
    agreement = compare_networks(
        model.network, lambda image: torch.from_numpy(session.run(None, {INPUT: image.numpy()})[0]), shapes
    )
    about["check"] = {
        "onnxruntime": version("onnxruntime"),
        "images": [list(shape) for shape in shapes],
        "max_difference": agreement.max_difference,
        "voxels": agreement.voxels,
        "decided_otherwise": agreement.decided_otherwise,
    }
    (folder / "model.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return agreement


def describe(model: Model) -> dict[str, Any]:
    """What a program needs to feed the network and to read its answer."""
    sliced = sliced_axis(model.inference.patch_size)
    axes = [name for axis, name in enumerate(_AXES) if axis != sliced]
    divisor = _divisor(model)
    return {
        "panorgan": panorgan.__version__,
        "name": model.card["name"],
        "run": model.card["run"],
        "organs": list(model.vocabulary),
        "channels": list(model.network.channels),
        "labels": label_ids(model.vocabulary),
        "convention": CONVENTIONS[model.network.activation],
        "activation": model.network.activation,
        "input": {
            "name": INPUT,
            "shape": ["batch", model.input_channels, *axes],
            "dtype": "float32",
            "range": [-1, 1],
            "divisible_by": dict(zip(axes, divisor, strict=True)),
            "channels": list(model.channels),
        },
        "output": {
            "name": OUTPUT,
            "shape": ["batch", len(model.network.channels), *axes],
            "activation": f"{model.network.activation} is inside the network",
        },
        "plan": model.plan.as_json(),
        "inference": model.inference.as_json(),
        "postprocess": model.postprocess,
    }


@torch.no_grad()
def _recorded(model: Model) -> Any:
    """The network as an ONNX program."""
    divisor = _divisor(model)
    batch = torch.export.Dim("batch", min=1)
    sizes = {2 + axis: _multiple(factor, f"size_{axis}") for axis, factor in enumerate(divisor)}
    # A size of one would be taken for a constant, so the example has two of everything.
    least = [max(size, 2 * factor) for size, factor in zip(_window(model), divisor, strict=True)]
    example = torch.zeros(2, model.input_channels, *least)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.onnx.export(
            PlainNetwork(model.network),
            (example,),
            dynamo=True,
            dynamic_shapes={"image": {0: batch, **sizes}},
            input_names=[INPUT],
            output_names=[OUTPUT],
            verbose=False,
        )


def _multiple(factor: int, name: str) -> Any:
    size = torch.export.Dim(name, min=1)
    return factor * size if factor > 1 else size


def _divisor(model: Model) -> tuple[int, ...]:
    """Sizes must be multiples of this; members of a merged network all have the same."""
    found = [m.divisor for m in model.network.modules() if isinstance(getattr(m, "divisor", None), tuple)]
    return tuple(math.lcm(*along) for along in zip(*found, strict=True))


def _window(model: Model) -> tuple[int, ...]:
    sliced = sliced_axis(model.inference.patch_size)
    return tuple(size for axis, size in enumerate(model.inference.patch_size) if axis != sliced)


def _checked_shapes(model: Model) -> list[tuple[int, ...]]:
    """One window, two windows, and three smaller ones of other proportions."""
    window, divisor = _window(model), _divisor(model)
    # At least two voxels at the deepest level: normalisation needs them.
    other = [max(2 * factor, size // 2 // factor * factor) for size, factor in zip(window, divisor, strict=True)]
    other[0] += divisor[0]
    channels = model.input_channels
    return [(1, channels, *window), (2, channels, *window), (3, channels, *other)]


def _onnxruntime() -> ModuleType:
    """Import onnxruntime and what else the exporter needs; an error says what to install."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise RunError(
            "Exporting to ONNX needs packages that are not installed.",
            code="onnx-missing",
            why=f"{error.name} cannot be imported",
            fix="Install panorgan's wheel with its extra: pip install './panorgan-VERSION-py3-none-any.whl[onnx]'",
        ) from error
    return onnxruntime


def _session(runtime: Any, path: Path) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _text(value: Any) -> str:
    """A value as a file's metadata holds it: text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
