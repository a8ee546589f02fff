"""Inspection of a FedIOD site's own scans after training: how well it segments them, where the network looks, and what
its heads contribute (eqs. 3 to 6, 17 and 18). Nothing is trained here, and nothing is drawn at random.

Maps are those of whole slices, cropped or padded around their centre to the size of a patch. With 3D patches a scan has
one map, that of its centre.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import torch

from panorgan.anatomy import Vocabulary
from panorgan.losses.partial import structure_probabilities
from panorgan.methods.base import SiteTools
from panorgan.methods.fediod.attention_maps import ScanMaps
from panorgan.methods.fediod.head_attribution import (
    STEPS,
    Attributor,
    foreground_probability,
    head_importance,
    largest_entries,
)
from panorgan.methods.fediod.inter_organ import InterOrganNetwork
from panorgan.preparation.batch import Batch, PackedBatch
from panorgan.preparation.sampling import sliced_axis, whole_scan
from panorgan.preparation.store import StoredCase

_AT_ONCE = 16
"""Slices processed together."""


class ScanInspector:
    """Inspects a site's training scans with the network that it has just trained, in evaluation mode.

    Parameters
    ----------
    organs : those that the site annotates.
    steps : of the integral of eq. 17.
    """

    def __init__(self, model: InterOrganNetwork, tools: SiteTools, organs: tuple[str, ...], steps: int = STEPS) -> None:
        self.model, self.tools, self.organs, self.steps = model, tools, organs, steps
        self.attributor = Attributor()

    # -- all scans

    def dice_losses(self) -> dict[str, float]:
        """Of every training scan, by its name."""
        losses = [self.dice_loss(case) for case in self.tools.cases]  # one synchronisation for all, at the end
        return dict(zip((case.id for case in self.tools.cases), torch.stack(losses).tolist(), strict=True))

    @torch.no_grad()
    def dice_loss(self, case: StoredCase) -> torch.Tensor:
        """1 − soft Dice of a whole scan, the mean over its annotated structures: every sum runs over all slices."""
        overlap = volume = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in self.pieces(self.scan(case)):
            with self.tools.autocast():
                logits, vocabulary = self.model.channels_for(batch.image, self.organs)
            probabilities = structure_probabilities(logits.float(), batch, vocabulary, self.model.activation)
            overlap = overlap + (probabilities * batch.masks).flatten(2).sum((0, 2)).double()
            volume = volume + (probabilities + batch.masks).flatten(2).sum((0, 2)).double()
        return (1 - (2 * overlap + 1) / (volume + 1)).mean()

    # -- the best scans

    def maps(self, scans: Sequence[str], depth: int) -> ScanMaps:
        """Eqs. 4 to 6: minimum and maximum attention over these scans, all resampled to `depth` slices."""
        over_scans = ScanMaps(depth)
        for case in self._cases(scans):
            over_scans.add(self.maps_of(case))
        return over_scans

    def importance(self, scans: Sequence[str]) -> list[list[float]]:
        """Eq. 18 by layer and head; nothing if no scan shows an organ."""
        found = [part for case in self._cases(scans) if (part := self.attribution_of(case)) is not None]
        rows: list[list[float]] = head_importance(found).tolist() if found else []
        return rows

    @torch.no_grad()
    def maps_of(self, case: StoredCase) -> torch.Tensor:
        """Eq. 3: Ā of every slice, [D, n, n]."""
        with self.tools.autocast():
            return torch.cat([self.model.attention(batch.image) for batch in self.pieces(self.scan(case))])

    def attribution_of(self, case: StoredCase) -> torch.Tensor | None:
        """The largest entry of eq. 17 in a scan, [layers, heads]; None where it shows no organ.

        Slices without any of the organs do not contribute to F.
        """
        scan = self.scan(case)
        shown = (scan.bits != 0).flatten(1).any(1).nonzero()
        if not len(shown):
            return None
        scan = scan[int(shown[0]) : int(shown[-1]) + 1]
        voxels = scan.unpack().masks.flatten(2).sum((0, 2))
        pieces = [largest_entries(self._attribution(batch, voxels)) for batch in self.pieces(scan)]
        return torch.stack(pieces).amax(0)

    def _attribution(self, batch: Batch, voxels: torch.Tensor) -> list[torch.Tensor]:
        vocabulary = Vocabulary(organ for organ in self.model.vocabulary if organ in self.organs)
        with torch.no_grad(), self.tools.autocast():  # once for all steps: the encoder does not depend on attention
            encoded = self.model.encoded(batch.image)
            maps = self.model.maps_of(encoded)

        def foreground(faded: Sequence[torch.Tensor]) -> torch.Tensor:  # possibly of several steps at once
            times = len(faded[0]) // len(batch.image)
            levels, masks = [_repeat(level, times) for level in encoded], _repeat(batch.masks, times)
            with self.model.override_attention(faded), self.tools.autocast():
                logits = self.model.decoded(levels, vocabulary.organs).float()
            probabilities = structure_probabilities(logits, batch, vocabulary, self.model.activation)
            return foreground_probability(probabilities, masks, voxels)

        return self.attributor(foreground, maps, batch.image[:, 0].numel(), self.steps)

    # -- sizes

    def median_depth(self) -> float:
        """Slices of the site's scans; 1 with 3D patches."""
        axis = sliced_axis(self.tools.patch_size)
        return 1.0 if axis is None else float(statistics.median(c.shape[axis] for c in self.tools.cases))

    def tokens(self) -> int:
        """Places of a patch for the transformer."""
        axis = sliced_axis(self.tools.patch_size)
        space = [size for along, size in enumerate(self.tools.patch_size) if along != axis]
        return math.prod(size // divisor for size, divisor in zip(space, self.model.divisor, strict=True))

    # -- scans as the network sees them

    def scan(self, case: StoredCase) -> PackedBatch:
        """All slices of a case, on the model's device."""
        return whole_scan(case, self.tools.patch_size).to(self._device)

    def pieces(self, scan: PackedBatch) -> Iterator[Batch]:
        """A scan a few slices at a time."""
        return (scan[start : start + _AT_ONCE].unpack() for start in range(0, len(scan), _AT_ONCE))

    def _cases(self, ids: Sequence[str]) -> Iterator[StoredCase]:
        return (case for case in self.tools.cases if case.id in ids)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def _repeat(tensor: torch.Tensor, times: int) -> torch.Tensor:
    """[B, ...] → [times · B, ...]."""
    return tensor if times == 1 else tensor.repeat(times, *(1,) * (tensor.ndim - 1))
