"""How much memory training needs, and how much there is."""

from __future__ import annotations

import math

import torch
from torch import nn

from panorgan.data.free_memory import free_memory
from panorgan.methods.base import Method
from panorgan.methods.protocol import Federation
from panorgan.networks import UNet, UNetSettings
from panorgan.networks.organ_parts import groups_of
from panorgan.networks.settings import OrganParts

USABLE = 0.8
"""Share of the free memory to plan with: the system and other programs need some."""
_PER_OUTPUT = 1.5
"""Bytes kept per byte of a layer's output: outputs for the backward pass, gradients, workspace. U-Nets of three
widths took 1.1 to 1.3 on a CPU."""
_PER_PARAMETER = 4
"""A weight, its gradient and the optimiser's two moments, in 4 bytes each."""
_BASE = 0.6e9
"""Bytes of Python and torch themselves."""


def available_memory(device: torch.device) -> float | None:
    """Free bytes where training computes; None where the system does not say."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def training_memory(
    method: Method,
    network: UNetSettings,
    federation: Federation,
    patch: tuple[int, int, int],
    batch: int,
    networks: int = 1,
) -> float:
    """Bytes that a training step takes, with so many sites' networks kept in memory. A model; computes no values."""
    settings = method.network_settings(network)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        plain = UNet(federation.vocabulary, settings.model_copy(update={"organs": "channels"}))
        sizes = [size for size in patch if size != 1]
        outputs = _output_elements(plain, torch.empty(1, settings.input_channels, *sizes))
        built = method.build_network(network, federation)
    outputs *= _passes(settings.organs, len(groups_of(federation.labelled_organs())))
    parameters = sum(parameter.numel() for parameter in built.parameters())
    return _BASE + 4.0 * (_PER_OUTPUT * outputs * batch + _PER_PARAMETER * parameters * networks)


def _passes(organs: OrganParts, groups: int) -> float:
    """How often the layers of a plain U-Net are there where organs have parts of their own."""
    shares = {"channels": 0.0, "heads": 0.0, "task_blocks": 0.3, "decoders": 0.5, "encoders": 1.0}
    return 1 + shares[organs] * max(groups - 1, 0)


@torch.no_grad()
def _output_elements(network: nn.Module, image: torch.Tensor) -> float:
    """Elements in the outputs of all layers for one image."""
    counts: list[int] = []

    def count(module: nn.Module, given: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            counts.append(math.prod(output.shape))

    hooks = [module.register_forward_hook(count) for module in network.modules() if not list(module.children())]
    network(image)
    for hook in hooks:
        hook.remove()
    return float(sum(counts))
