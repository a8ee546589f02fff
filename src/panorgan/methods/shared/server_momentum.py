"""Momentum at the server, arXiv:1909.06335: v ← β·v + (mean − w), w ← w + v. A piece for methods."""

from __future__ import annotations

import torch
from pydantic import Field

from panorgan.methods.base import Payload, ServerRule, Updates
from panorgan.methods.shared.prefixed import prefixed, under
from panorgan.methods.shared.server_average import STATISTICS
from panorgan.settings import Settings

_V = "momentum/"


class MomentumSettings(Settings):
    """The setting of the momentum."""

    server_momentum: float = Field(0.6, ge=0, lt=1, description="share β of earlier updates that is added to the mean")


class MomentumServer(ServerRule):
    """Goes on in the direction of earlier rounds. Statistics of batch normalisation are averaged as they are."""

    config: MomentumSettings  # type: ignore[assignment]  # beside those of the rule that it extends

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.velocity: dict[str, torch.Tensor] = {}

    def aggregate(self, updates: Updates) -> None:
        """The mean, then as far again as earlier rounds say."""
        before = dict(self.weights)
        super().aggregate(updates)
        if not self.in_training:
            return
        for key, mean in self.weights.items():
            if key in before and mean.is_floating_point() and not key.endswith(STATISTICS):
                earlier = self.velocity.get(key, torch.zeros_like(mean)).double()
                velocity = self.config.server_momentum * earlier + (mean.double() - before[key].double())
                self.weights[key] = (before[key].double() + velocity).to(mean.dtype)
                self.velocity[key] = velocity.to(mean.dtype)

    def state(self) -> Payload:
        """The velocity."""
        whole = super().state()
        return Payload({**whole.tensors, **prefixed(_V, self.velocity)}, whole.scalars)

    def load_state(self, state: Payload) -> None:
        """Restore it."""
        super().load_state(state)
        self.velocity = under(_V, state.tensors)
