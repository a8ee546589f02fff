"""A model folder of nnU-Net v2, for `nnUNetv2_predict_from_modelfolder` and as pretrained weights.

panorgan's plain 3D U-Net is nnU-Net's PlainConvUNet without the biases that instance normalisation removes again, so
its weights carry over as they are. Other networks have no counterpart there and are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from panorgan.errors import RunError
from panorgan.networks import UNet
from panorgan.networks.settings import UNetSettings
from panorgan.workflows.model_bundle import Model

CONFIGURATION = "3d_fullres"
_TRAINER = "nnUNetTrainer"
_TO_XYZ = [2, 1, 0]  # nnU-Net reads arrays as z, y, x


def write_nnunet(model: Model, folder: Path) -> None:
    """Write `dataset.json`, `plans.json` and `fold_0/checkpoint_final.pth`."""
    settings = _supported(model)
    (folder / "fold_0").mkdir(parents=True)
    files = {"dataset.json": dataset(model), "plans.json": plans(model, settings)}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    checkpoint = {
        "network_weights": network_weights(model.network),
        "trainer_name": _TRAINER,
        "init_args": {"configuration": CONFIGURATION},
        # panorgan does not mirror at prediction, and left and right organs must not be mirrored.
        "inference_allowed_mirroring_axes": None,
    }
    torch.save(checkpoint, folder / "fold_0" / "checkpoint_final.pth")


def _supported(model: Model) -> UNetSettings:
    """The settings of a network that nnU-Net can build; an error with the first reason otherwise."""
    settings = UNetSettings(**model.card["network"])
    reasons = {
        "its network is not one U-Net with a channel per organ": type(model.network) is not UNet,
        "its network has two dimensions": settings.dimensions != 3,
        "its scans have several channels": model.input_channels > 1,
        "its organs are sigmoids, which nnU-Net has for nested regions only": settings.activation != "softmax",
        f"it is normalised by {settings.norm}": settings.norm != "instance",
        "its encoder is residual": settings.residual,
        "nnU-Net does not clip standardised intensities": model.plan.intensity != "window",
        f"nnU-Net cannot apply the post-processing {model.postprocess!r}": model.postprocess not in ("none", "pieces"),
    }
    why = next((reason for reason, applies in reasons.items() if applies), None)
    if why is None:
        return settings
    raise RunError(
        "This model cannot be expressed as an nnU-Net.",
        code="not-an-nnunet",
        why=why,
        fix="Export it as a MONAI Bundle or to ONNX: --to bundle, --to onnx.",
    )


def dataset(model: Model) -> dict[str, Any]:
    """`dataset.json`."""
    return {
        "name": model.card["name"],
        "channel_names": {"0": "CT"},
        "labels": {"background": 0, **{organ: place for place, organ in enumerate(model.vocabulary, start=1)}},
        "numTraining": sum(site["train_cases"] for site in model.card["sites"].values()),
        "file_ending": ".nii.gz",
        "overwrite_image_reader_writer": "NibabelIOWithReorient",
    }


def plans(model: Model, settings: UNetSettings) -> dict[str, Any]:
    """`plans.json`: the preparation and the architecture in nnU-Net's words."""
    low, high = model.plan.window_hu
    spacing, patch = list(model.plan.spacing_mm), list(model.inference.patch_size)
    # CTNormalization clips to two percentiles, then subtracts the mean and divides by the spread.
    window = {
        "percentile_00_5": low,
        "percentile_99_5": high,
        "mean": (low + high) / 2,
        "std": (high - low) / 2,
        "median": (low + high) / 2,
        "min": low,
        "max": high,
    }
    name = f"Dataset000_{model.card['name']}"
    return {
        "dataset_name": name,
        "plans_name": "nnUNetPlans",
        "original_median_spacing_after_transp": spacing,
        "original_median_shape_after_transp": patch,
        "image_reader_writer": "NibabelIOWithReorient",
        "transpose_forward": _TO_XYZ,
        "transpose_backward": _TO_XYZ,
        "experiment_planner_used": "panorgan",
        "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": {"0": window},
        "configurations": {
            CONFIGURATION: {
                "data_identifier": f"nnUNetPlans_{CONFIGURATION}",
                "preprocessor_name": "DefaultPreprocessor",
                "batch_size": 2,
                "patch_size": patch,
                "median_image_size_in_voxels": patch,
                "spacing": spacing,
                "normalization_schemes": ["CTNormalization"],
                "use_mask_for_norm": [False],
                "batch_dice": True,
                **_resampling(model),
                "architecture": _architecture(settings),
            }
        },
    }


def _resampling(model: Model) -> dict[str, Any]:
    """Linear by torch, which is what panorgan does; cubic images by nnU-Net's own function."""
    linear: dict[str, Any] = {"is_seg": False, "mode": "linear", "force_separate_z": False, "num_threads": 1}
    found: dict[str, Any] = {}
    for kind, kwargs in (("data", linear), ("seg", {**linear, "is_seg": True}), ("probabilities", linear)):
        found[f"resampling_fn_{kind}"] = "resample_torch_fornnunet"
        found[f"resampling_fn_{kind}_kwargs"] = kwargs
    if model.plan.image_interpolation == "cubic":
        found["resampling_fn_data"] = "resample_data_or_seg_to_shape"
        found["resampling_fn_data_kwargs"] = {"is_seg": False, "order": 3, "order_z": 0, "force_separate_z": None}
    return found


def _architecture(settings: UNetSettings) -> dict[str, Any]:
    levels = len(settings.features)
    return {
        "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        "arch_kwargs": {
            "n_stages": levels,
            "features_per_stage": list(settings.features),
            "conv_op": "torch.nn.modules.conv.Conv3d",
            "kernel_sizes": [list(kernel) for kernel in settings.level_kernels],
            "strides": [list(stride) for stride in settings.level_strides],
            "n_conv_per_stage": [2] * levels,
            "n_conv_per_stage_decoder": [2] * (levels - 1),
            "conv_bias": True,
            "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
            "norm_op_kwargs": {"eps": 1e-5, "affine": True},
            "dropout_op": None,
            "dropout_op_kwargs": None,
            "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"negative_slope": 0.01, "inplace": True},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def network_weights(network: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a plain U-Net by the keys of PlainConvUNet, which lists some of them twice."""
    found: dict[str, torch.Tensor] = {}
    levels = [*network.encoder, network.bottleneck]  # type: ignore[misc]
    for place, block in enumerate(levels):
        for prefix in ("encoder", "decoder.encoder"):  # the decoder holds its encoder, too
            found |= _convolutions(block, f"{prefix}.stages.{place}.0.convs")
    for place, level in enumerate(network.decoder):  # type: ignore[arg-type]
        found |= _convolutions(level.conv_block, f"decoder.stages.{place}.convs")
        upward = level.transp_conv.conv.weight
        found[f"decoder.transpconvs.{place}.weight"] = upward
        found[f"decoder.transpconvs.{place}.bias"] = torch.zeros(upward.shape[1])
    found |= _outputs(network)
    return {key: value.detach().cpu().clone().contiguous() for key, value in found.items()}


def _convolutions(block: Any, prefix: str) -> dict[str, torch.Tensor]:
    """Two convolutions, each with its normalisation."""
    found: dict[str, torch.Tensor] = {}
    for place, (convolution, norm) in enumerate(((block.conv1, block.norm1), (block.conv2, block.norm2))):
        weight = convolution.conv.weight
        for first, second in (("conv", "norm"), ("all_modules.0", "all_modules.1")):
            start = f"{prefix}.{place}"
            found[f"{start}.{first}.weight"] = weight
            found[f"{start}.{first}.bias"] = torch.zeros(len(weight))  # the norm removes it
            found[f"{start}.{second}.weight"], found[f"{start}.{second}.bias"] = norm.weight, norm.bias
    return found


def _outputs(network: nn.Module) -> dict[str, torch.Tensor]:
    """The output layer at full resolution, and zeros for those of deep supervision, which prediction does not use."""
    head: Any = network.head.conv.conv  # type: ignore[union-attr]
    found: dict[str, torch.Tensor] = {}
    for place, width in enumerate(_widths(network)):
        found[f"decoder.seg_layers.{place}.weight"] = head.weight.new_zeros(len(head.weight), width, 1, 1, 1)
        found[f"decoder.seg_layers.{place}.bias"] = torch.zeros(len(head.weight))
    last = len(network.decoder) - 1  # type: ignore[arg-type]
    found[f"decoder.seg_layers.{last}.weight"] = head.weight
    found[f"decoder.seg_layers.{last}.bias"] = head.bias
    return found


def _widths(network: nn.Module) -> Iterator[int]:
    for level in network.decoder:  # type: ignore[union-attr]
        yield level.transp_conv.conv.weight.shape[1]
