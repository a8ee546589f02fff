"""A MONAI Bundle: `python -m monai.bundle run inference` gives the same label maps, without panorgan.

The network is TorchScript with the activation inside. What panorgan does before and after it travels in `scripts`.
"""

from __future__ import annotations

import json
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import panorgan
from panorgan.exporting.bundle_scripts import write_scripts
from panorgan.exporting.check import Agreement, compare_networks
from panorgan.exporting.plain_network import PlainNetwork
from panorgan.exporting.texts import LICENCE, bundle_readme
from panorgan.preparation.sampling import sliced_axis
from panorgan.workflows.model_bundle import Model

_WINDOWS, _SLICES = 2, 16  # as `evaluation.inference` takes them where the settings leave it open


def write_bundle(model: Model, folder: Path, card: str, licences: dict[str, str]) -> Agreement:
    """Write the bundle and check its network; `card` is the model card, `licences` those of the data by site."""
    (folder / "models").mkdir(parents=True)
    (folder / "configs").mkdir()
    (folder / "docs").mkdir()
    agreement, any_device = _write_network(model, folder / "models" / "model.ts")
    _write_json(folder / "configs" / "metadata.json", metadata(model, licences))
    _write_json(folder / "configs" / "inference.json", inference(model, any_device))
    write_scripts(folder / "scripts", model.vocabulary)
    (folder / "docs" / "README.md").write_text(bundle_readme(model) + "\n" + card, encoding="utf-8")
    (folder / "LICENSE").write_text(LICENCE, encoding="utf-8")
    return agreement


@torch.no_grad()
def _write_network(model: Model, path: Path) -> tuple[Agreement, bool]:
    """Trace the network with one window and run the written file with one, two and three.

    Returns also whether it runs on any device: a trace that makes tensors itself makes them on the CPU, for good.
    """
    shape = (model.input_channels, *_window(model))
    with warnings.catch_warnings():
        # TorchScript is deprecated in favour of torch.export, whose files only newer versions of PyTorch read.
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(PlainNetwork(model.network), torch.zeros(2, *shape), check_trace=False)
        torch.jit.save(traced, str(path))
        loaded = torch.jit.load(str(path))
        agreement = compare_networks(model.network, loaded, [(batch, *shape) for batch in (1, 2, 3)])
    graph = loaded.inlined_graph  # its nodes live as long as it does
    devices = (node.output().type().kind() for node in graph.findAllNodes("prim::Constant"))
    return agreement, "DeviceObjType" not in set(devices)


def _window(model: Model) -> tuple[int, ...]:
    patch, sliced = model.inference.patch_size, sliced_axis(model.inference.patch_size)
    return tuple(size for axis, size in enumerate(patch) if axis != sliced)


def inference(model: Model, any_device: bool = True) -> dict[str, Any]:
    """`configs/inference.json`."""
    device = "'cuda' if torch.cuda.is_available() else 'cpu'" if any_device else "'cpu'"
    several = model.input_channels > 1
    scans = {"_target_": "scripts.transforms.scans_of", "files": "@datalist", "channels": model.input_channels}
    return {
        "imports": ["$import glob"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/data'",
        "output_dir": "$@bundle_root + '/eval'",
        "datalist": "$sorted(glob.glob(@dataset_dir + '/*.nii') + glob.glob(@dataset_dir + '/*.nii.gz'))",
        **({"scans": scans} if several else {}),
        "device": f"$torch.device({device})",
        "network_def": "$torch.jit.load(@bundle_root + '/models/model.ts', map_location=@device)",
        "network": "$@network_def.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": _preprocessing(model)},
        "dataset": {
            "_target_": "Dataset",
            "data": f"$[{{'image': scan}} for scan in {'@scans' if several else '@datalist'}]",
            "transform": "@preprocessing",
        },
        "dataloader": {
            "_target_": "DataLoader",
            "dataset": "@dataset",
            "batch_size": 1,  # scans differ in size
            "shuffle": False,
            "num_workers": 0,
        },
        "inferer": _inferer(model),
        "postprocessing": {"_target_": "Compose", "transforms": _postprocessing(model)},
        "handlers": [{"_target_": "StatsHandler", "iteration_log": False}],
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "val_handlers": "@handlers",
            "amp": False,
        },
        "run": ["$@evaluator.run()"],
        "inference": ["$@evaluator.run()"],
    }


def _preprocessing(model: Model) -> list[dict[str, Any]]:
    reader = {"_target_": "scripts.transforms.Float32Reader", "squeeze_non_spatial_dims": True}
    return [
        {"_target_": "LoadImaged", "keys": "image", "reader": reader, "ensure_channel_first": True},
        {"_target_": "scripts.transforms.PrepareImaged", "keys": "image", "plan": model.plan.as_json()},
    ]


def _inferer(model: Model) -> dict[str, Any]:
    sliced, settings = sliced_axis(model.inference.patch_size), model.inference
    content = {
        "_target_": "SlidingWindowInferer" if sliced is None else "scripts.transforms.SlicesInferer",
        "roi_size": list(_window(model)),
        "sw_batch_size": settings.windows_at_once or (_WINDOWS if sliced is None else _SLICES),
        "overlap": settings.overlap,
        "mode": "gaussian",
        "padding_mode": "constant",
        "cval": -1.0,
    }
    return content if sliced is None else {**content, "axis": sliced}


def _postprocessing(model: Model) -> list[dict[str, Any]]:
    vocabulary = model.vocabulary
    outer = [[vocabulary.index(o) for o in vocabulary if organ in vocabulary.inside(o)] for organ in vocabulary]
    return [
        {
            "_target_": "scripts.transforms.DecideLabelsd",
            "keys": "pred",
            "image_key": "image",
            "softmax": model.network.activation == "softmax",
            "organs": list(vocabulary),
            "paint_order": [vocabulary.index(organ) for organ in vocabulary.paint_order()],
            "outer": outer,
            "postprocess": model.postprocess,
        },
        {
            "_target_": "SaveImaged",
            "keys": "pred",
            "output_dir": "@output_dir",
            "output_postfix": "seg",
            "output_dtype": "$np.uint8",
            "resample": False,
            "separate_folder": False,
        },
    ]


def metadata(model: Model, licences: dict[str, str]) -> dict[str, Any]:
    """`configs/metadata.json`."""
    card, window = model.card, list(_window(model))
    channels = {str(place): name for place, name in enumerate(model.network.channels)}
    labels = {"0": "background", **{str(place): organ for place, organ in enumerate(model.vocabulary, start=1)}}
    ct = model.plan.intensity == "window"
    inputs = model.channels or ("image",)
    of_channels = f"{len(inputs)} channels ({', '.join(inputs)}), " if len(inputs) > 1 else "one channel, "
    named = ", ".join(model.vocabulary)
    return {
        "version": "1.0.0",
        "changelog": {"1.0.0": f"exported by panorgan {panorgan.__version__}"},
        "monai_version": _version("monai"),
        "pytorch_version": _version("torch"),
        "numpy_version": _version("numpy"),
        "required_packages_version": {name: _version(name) for name in ("nibabel", "scipy", "pytorch-ignite")},
        "name": card["name"],
        "task": f"segmentation of {named}",
        "description": f"{named}; trained with panorgan on cases of {len(card['sites'])} sites",
        "authors": "the federation that trained the model",
        "copyright": "see LICENSE",
        "data_source": "; ".join(f"{site}: {stated}" for site, stated in licences.items()) or "not stated",
        "data_type": "nibabel",
        "image_classes": of_channels + ("CT in Hounsfield units" if ct else "MR or other, any scale"),
        "pred_classes": "one-hot probabilities before the decision, an integer per organ after it",
        "label_classes": labels,
        "intended_use": "research; not a medical device, not for diagnosis",
        "created": time.strftime("%Y-%m-%d"),
        "panorgan": {"run": card["run"], "round": card["round"], "method": card["method"], "sites": card["sites"]},
        "network_data_format": {
            "inputs": {
                "image": {
                    "type": "image",
                    "format": "hounsfield" if ct else "magnitude",
                    "modality": "CT" if ct else "MR",
                    "num_channels": len(inputs),
                    "spatial_shape": window,
                    "dtype": "float32",
                    "value_range": [-1, 1],
                    "is_patch_data": True,
                    "channel_def": {str(place): name for place, name in enumerate(inputs)},
                }
            },
            "outputs": {
                "pred": {
                    "type": "probabilities",
                    "format": "segmentation",
                    "num_channels": len(channels),
                    "spatial_shape": window,
                    "dtype": "float32",
                    "value_range": [0, 1],
                    "is_patch_data": True,
                    "channel_def": channels,
                }
            },
        },
    }


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:  # the bundle needs it where it is run, not here
        return "any"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
