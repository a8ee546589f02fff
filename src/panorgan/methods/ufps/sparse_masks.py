"""The weights that sUSAM perturbs: masks at a site, their bits on the wire, and the mask on which sites disagree.

UFPS, eqs. 11 to 13. At a site M_L selects the largest gradients, M_E adds some that matter to other sites. A site's
long-term mask M_{L,mo} travels as one bit per weight; the server answers with M_G, the weights on which sites disagree.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from panorgan.methods.ufps.masks import Momentum, extra, global_mask, largest, pack, unpack

LOCAL, GLOBAL = "mask/local", "mask/global"
"""Keys of the packed masks that a site sends and receives."""
_CURRENT = "mask/current"
# Buffers have no gradient: masks cover parameters alone.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def parameter_count(weights: Mapping[str, torch.Tensor]) -> int:
    """The number of parameter values in a state dict: the length of a mask."""
    return sum(value.numel() for key, value in weights.items() if key.rpartition(".")[2] not in _BUFFERS)


class SiteMasks:
    """The mask in use, M_L ∪ M_E, and the running mean of |g| from which M_{L,mo} comes."""

    def __init__(self, local_share: float, global_share: float, momentum: float) -> None:
        self.local_share, self.global_share = local_share, global_share
        self.current: torch.Tensor | None = None
        """[n] bool; None before the first refresh."""
        self._momentum = Momentum(momentum)

    def refresh(self, gradient: torch.Tensor, global_bits: torch.Tensor | None, generator: torch.Generator) -> None:
        """New masks for an ascent gradient [n]; `global_bits` is M_G, packed, once the server has one."""
        self._momentum.update(gradient)
        self.current = largest(gradient, self.local_share)
        if global_bits is not None and self.global_share:
            theirs = unpack(global_bits, len(gradient))
            self.current |= extra(self.current, theirs, self.global_share, generator)

    def long_term_bits(self) -> torch.Tensor:
        """M_{L,mo}, packed."""
        return pack(self._momentum.mask(self.local_share))

    def state(self) -> dict[str, torch.Tensor]:
        """What must survive until the next round."""
        current = {} if self.current is None else {_CURRENT: pack(self.current)}
        return {**current, **self._momentum.state()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state` returned."""
        self._momentum.load(state)
        values = self._momentum.values
        has_mask = _CURRENT in state and values is not None
        self.current = unpack(state[_CURRENT], len(values)) if has_mask and values is not None else None


class ServerMasks:
    """The newest M_{L,mo} of every site, and M_G."""

    def __init__(self) -> None:
        self._of: dict[str, torch.Tensor] = {}

    def collect(self, masks: Mapping[str, torch.Tensor]) -> None:
        """Take masks that came in; a site that sent none keeps its last."""
        # Copies: a tensor of an answer would keep the whole answer open, which lies on disk.
        self._of |= {site: mask.clone() for site, mask in masks.items()}

    def global_bits(self, n: int) -> torch.Tensor | None:
        """M_G (eq. 12), packed; None before any site has sent a mask."""
        return global_mask(self._of.values(), n) if self._of else None

    def state(self) -> dict[str, torch.Tensor]:
        """What the coordinator must keep."""
        return {f"{LOCAL}/{site}": mask for site, mask in self._of.items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state` returned."""
        prefix = f"{LOCAL}/"
        self._of = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
