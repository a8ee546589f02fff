"""From a network and a scan to named masks: one sliding-window pass for all organs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from monai.inferers.utils import sliding_window_inference
from numpy.typing import NDArray
from pydantic import Field

from panorgan.anatomy import Vocabulary
from panorgan.data.volume import Volume
from panorgan.errors import AnatomyError
from panorgan.evaluation.postprocess import apply_preset, clean_label_map
from panorgan.networks import OrganNetwork, SegmentationNetwork
from panorgan.preparation.plan import Plan
from panorgan.preparation.preprocess import Grid, prepare_image, to_scan_grid, with_channels
from panorgan.preparation.sampling import sliced_axis
from panorgan.settings import Settings

# A sigmoid channel counts as present from here on.
_THRESHOLD = 0.5


class InferenceSettings(Settings):
    """How windows are laid over a scan; travels with the model."""

    patch_size: tuple[int, int, int] = Field(description="voxels (R, A, S); 1 along an axis for slices across it")
    overlap: float = Field(0.5, ge=0, lt=1)
    windows_at_once: int | None = Field(None, ge=1, description="if left out: 2, or 16 of a network that sees slices")


@torch.no_grad()
def predict_probabilities(
    network: SegmentationNetwork, image: torch.Tensor, settings: InferenceSettings, organs: Vocabulary | None = None
) -> torch.Tensor:
    """Channel probabilities [channels, X, Y, Z] for a prepared image [X, Y, Z] or [C, X, Y, Z].

    Every organ in the same pass.

    With `organs`, a network with per-organ parts computes these alone, which are then the channels.

    Where `patch_size` is 1 along an axis, the network sees the slices across that axis, as a batch of 2D images.
    The network keeps its mode (training or evaluation).
    """
    device = next(network.parameters()).device
    was_training = network.training
    network.eval()

    def activated(windows: torch.Tensor) -> torch.Tensor:
        logits = (network(windows) if organs is None else network.channels_for(windows, organs.organs)[0]).float()
        return logits.softmax(1) if network.activation == "softmax" else logits.sigmoid()

    sliced = sliced_axis(settings.patch_size)
    image = with_channels(image)
    images = image[None] if sliced is None else image.movedim(1 + sliced, 0)
    try:
        probabilities: torch.Tensor = sliding_window_inference(  # type: ignore[assignment]
            images.to(device),
            [size for axis, size in enumerate(settings.patch_size) if axis != sliced],
            settings.windows_at_once or (2 if sliced is None else 16),
            activated,
            overlap=settings.overlap,
            mode="gaussian",
            padding_mode="constant",
            cval=-1.0,
        )
    finally:
        network.train(was_training)
    # [slices, channels, *S] → the slices back at their axis.
    return probabilities[0] if sliced is None else probabilities.movedim(0, 1 + sliced).contiguous()


Place = Callable[[torch.Tensor], torch.Tensor]
"""Resamples one channel to the grid on which labels are decided."""


def decide(
    probabilities: Sequence[torch.Tensor], network: SegmentationNetwork, place: Place = lambda channel: channel
) -> NDArray[np.uint8]:
    """Label map [X, Y, Z]: 0 for background, i + 1 for organ i of the vocabulary.

    Softmax: the most probable channel. Sigmoid: organs above one half; where they overlap, an inner structure
    wins over the one that contains it, and among others the more probable one. `place` is applied channel by
    channel, so that a large scan never needs all channels at its full resolution.
    """
    if network.activation == "softmax":
        return _most_probable(probabilities, place)
    return _paint(dict(zip(network.channels, probabilities, strict=True)), network.vocabulary, place)


def predict_volume(
    network: SegmentationNetwork,
    volume: Volume,
    plan: Plan,
    settings: InferenceSettings,
    organs: Collection[str] | None = None,
) -> NDArray[np.uint8]:
    """Label map on the scan's own grid: exactly its shape and orientation.

    `organs` leaves the others out, with the same integers for those that stay. A network with per-organ parts computes
    only these; where an organ that was left out overlaps with one that stays, the one that stays gets the voxel.
    """
    grid, vocabulary = Grid.of(volume, plan), network.vocabulary
    image = prepare_image(volume, plan, grid)

    def place(channel: torch.Tensor) -> torch.Tensor:
        return to_scan_grid(channel, grid)

    if organs is not None and isinstance(network, OrganNetwork):
        computed = Vocabulary(organ for organ in vocabulary if organ in organs)
        probabilities = predict_probabilities(network, image, settings, computed).cpu()
        painted = _paint(dict(zip(computed, probabilities, strict=True)), computed, place)
        labels = np.array([0, *(vocabulary.index(organ) + 1 for organ in computed)], dtype=np.uint8)[painted]
    else:
        labels = decide(list(predict_probabilities(network, image, settings).cpu()), network, place)
    return grid.turn_back(labels if organs is None else only_organs(labels, organs, vocabulary))


def only_organs(labels: NDArray[np.uint8], organs: Collection[str], vocabulary: Vocabulary) -> NDArray[np.uint8]:
    """A label map without the other organs."""
    kept = np.array([0, *(place * (organ in organs) for place, organ in enumerate(vocabulary, start=1))])
    chosen: NDArray[np.uint8] = kept.astype(np.uint8)[labels]
    return chosen


def predict_organs(
    network: SegmentationNetwork, volume: Volume, plan: Plan, settings: InferenceSettings, preset: str = "none"
) -> dict[str, NDArray[np.bool_]]:
    """A mask per organ on the scan's own grid, independent of each other: sigmoid channels may overlap.

    With softmax channels that is the label map, organ by organ.
    """
    if network.activation == "softmax":
        labels = clean_labels(predict_volume(network, volume, plan, settings), network.vocabulary, preset)
        return {organ: structure_mask(labels, organ, network.vocabulary) for organ in network.vocabulary}
    grid = Grid.of(volume, plan)
    probabilities = predict_probabilities(network, prepare_image(volume, plan, grid), settings).cpu()
    present = {
        organ: grid.turn_back((to_scan_grid(channel, grid) >= _THRESHOLD).numpy())
        for organ, channel in zip(network.channels, probabilities, strict=True)
    }
    return apply_preset(preset, present, exclusive=False)


def label_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """The integer of each organ in a label map."""
    return {organ: index + 1 for index, organ in enumerate(vocabulary)}


def clean_labels(labels: NDArray[np.uint8], vocabulary: Vocabulary, preset: str) -> NDArray[np.uint8]:
    """A label map after a post-processing preset; where organs then overlap, the inner one wins."""
    return clean_label_map(preset, labels, vocabulary.organs, vocabulary.paint_order())


def knows(vocabulary: Vocabulary, structure: str) -> bool:
    """Whether a model with these organs can show the structure."""
    try:
        return bool(vocabulary.members(structure))
    except AnatomyError:
        return False


def structure_mask(labels: NDArray[np.uint8], structure: str, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """The mask of a structure in a label map, inner structures and parts included."""
    ids = label_ids(vocabulary)
    return np.isin(labels, [ids[organ] for organ in vocabulary.members(structure)])


def _most_probable(channels: Sequence[torch.Tensor], place: Place) -> NDArray[np.uint8]:
    best = place(channels[0])
    labels = torch.zeros(best.shape, dtype=torch.uint8)
    for index, channel in enumerate(channels[1:], start=1):
        probability = place(channel)
        labels[probability > best] = index
        best = torch.maximum(best, probability)
    return labels.numpy()


def _paint(channels: dict[str, torch.Tensor], vocabulary: Vocabulary, place: Place) -> NDArray[np.uint8]:
    labels, best = torch.zeros(0, dtype=torch.uint8), torch.zeros(0)
    for organ in vocabulary.paint_order():
        probability = place(channels[organ])
        if not best.numel():
            labels, best = torch.zeros(probability.shape, dtype=torch.uint8), torch.zeros_like(probability)
        outer = [vocabulary.index(other) + 1 for other in vocabulary if organ in vocabulary.inside(other)]
        over_outer = torch.isin(labels, torch.tensor(outer, dtype=torch.uint8))
        wins = (probability >= _THRESHOLD) & ((probability > best) | over_outer)
        labels[wins] = vocabulary.index(organ) + 1
        best = torch.where(wins, probability, best)
    return labels.numpy()
