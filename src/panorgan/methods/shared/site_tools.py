"""What the site worker passes to a rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from panorgan.errors import RunError
from panorgan.evaluation.inference import InferenceSettings, predict_probabilities
from panorgan.methods.protocol import MemoryTensorStore, Scalars, TensorStore
from panorgan.networks import SegmentationNetwork
from panorgan.preparation.store import StoredCase


def _predict_at_once(network: SegmentationNetwork, image: torch.Tensor) -> torch.Tensor:
    """One window as large as the image."""
    x, y, z = image.shape[-3:]
    return predict_probabilities(network, image, InferenceSettings(patch_size=(x, y, z), overlap=0.0))


def _no_other_networks(site: str) -> SegmentationNetwork:
    raise RunError(f"This rule was given no way to build the network of {site}.", code="no-network-builder")


@dataclass
class SiteTools:
    """What the site worker passes to a rule: the model on its device, the optimiser, and the numerical settings.

    `autocast()` returns a new context each time, so that contexts can be nested. `tensor_store` keeps tensors
    of this run on the site's disk, `cases` are the training cases. `predict(network, image)` gives channel
    probabilities [channels, X, Y, Z] by the experiment's sliding window on the site's device; `inference_key` names
    everything they depend on besides network and image. `network_of(site)` builds what that site trains, untrained.
    `patch_size` is that of the batches, in voxels (R, A, S); 1 along an axis means slices across it.
    `validate(network, organs)` gives the mean Dice per structure over the site's validation cases, for a network that
    was trained on these organs only; `validate_every` is the number of rounds between validations, 0 for never.
    """

    model: SegmentationNetwork
    optimizer: torch.optim.Optimizer
    clip_norm: float | None = None
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    tensor_store: TensorStore = field(default_factory=MemoryTensorStore)
    cases: Sequence[StoredCase] = ()
    predict: Callable[[SegmentationNetwork, torch.Tensor], torch.Tensor] = _predict_at_once
    inference_key: str = ""
    network_of: Callable[[str], SegmentationNetwork] = _no_other_networks
    patch_size: tuple[int, int, int] = (64, 64, 64)
    validate: Callable[[SegmentationNetwork, Collection[str]], Scalars] = lambda network, organs: {}
    validate_every: int = 0
