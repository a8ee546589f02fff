"""FedOpt — the server follows the sites' mean update with Adam or Yogi, as if it were a gradient. arXiv:2003.00295

Both keep a mean m of the updates and an estimate v of their squares, weight by weight, so that weights which sites
seldom move take steps as large as others. FedYogi lets v fall more slowly than FedAdam does.

As published, neither corrects m and v for their beginning at 0 and τ². Statistics of batch normalisation are averaged
as they are. An organ's output row that no owner has answered for has an update of 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field

from panorgan.methods.base import Method, Payload, ServerRule, Updates, published
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.registry import register
from panorgan.methods.shared.prefixed import prefixed, under
from panorgan.methods.shared.server_average import STATISTICS
from panorgan.settings import Settings

_M, _V = "fedopt/m/", "fedopt/v/"
_ABOUT = (__doc__ or "").partition(" — ")[2]


class AdaptiveSettings(Settings):
    """The server's optimiser. The published rate is tuned for each data set."""

    server_rate: float = published(0.01, "tuned: 10⁻³ to 10", "the server's learning rate η", gt=0)
    beta1: float = published(0.9, "0.9", "share of earlier updates in their mean", ge=0, lt=1)
    beta2: float = published(0.99, "0.99", "share of earlier squares in their mean", ge=0, lt=1)
    tau: float = published(1e-3, "10⁻³", "adaptivity τ: what is added to √v", gt=0)


class FedOptConfig(AdaptiveSettings, FedAvgConfig):
    """The settings of FedAvg and of the server's optimiser, which takes the step."""

    server_step: Literal[1] = Field(1, description="the optimiser takes the step")


class AdaptiveServer(ServerRule):
    """w ← w + η·m/(√v + τ), with m ← β₁·m + (1 − β₁)·Δ and v of Adam; Δ is the mean of the updates."""

    config: FedOptConfig

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.m: dict[str, torch.Tensor] = {}
        self.v: dict[str, torch.Tensor] = {}

    def second_moment(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """β₂·v + (1 − β₂)·Δ²."""
        return self.config.beta2 * v + (1 - self.config.beta2) * square

    def aggregate(self, updates: Updates) -> None:
        """The mean, then a step towards it."""
        before = dict(self.weights)
        super().aggregate(updates)
        if not self.in_training:
            return
        for key, mean in self.weights.items():
            if not mean.is_floating_point() or key.endswith(STATISTICS) or key not in before:
                continue
            delta = mean.double() - before[key].double()
            m = self.m.get(key, torch.zeros_like(mean)).double()
            v = self.v.get(key, torch.full_like(mean, self.config.tau**2)).double()
            m = self.config.beta1 * m + (1 - self.config.beta1) * delta
            v = self.second_moment(v, delta.square())
            step = self.config.server_rate * m / (v.sqrt() + self.config.tau)
            self.weights[key] = (before[key].double() + step).to(mean.dtype)
            self.m[key], self.v[key] = m.to(mean.dtype), v.to(mean.dtype)

    def state(self) -> Payload:
        """Both moments."""
        whole = super().state()
        return Payload({**whole.tensors, **prefixed(_M, self.m), **prefixed(_V, self.v)}, whole.scalars)

    def load_state(self, state: Payload) -> None:
        """Restore them."""
        super().load_state(state)
        self.m = under(_M, state.tensors)
        self.v = under(_V, state.tensors)


class YogiServer(AdaptiveServer):
    """The same with v of Yogi."""

    def second_moment(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """v − (1 − β₂)·Δ²·sign(v − Δ²)."""
        return v - (1 - self.config.beta2) * square * (v - square).sign()


@register("fedadam", config=FedOptConfig)
class FedAdam(Method):
    """FedAvg whose server takes Adam's steps."""

    text: ClassVar[str] = f"FedAdam — {_ABOUT}"
    paper: ClassVar[str] = "arXiv:2003.00295"
    equations: ClassVar[Mapping[str, str]] = {"Algorithm 2, FedAdam": "`Server.aggregate`, `Server.second_moment`"}

    class Server(AdaptiveServer):
        """Adam on the mean of the updates."""


@register("fedyogi", config=FedOptConfig)
class FedYogi(Method):
    """FedAvg whose server takes Yogi's steps."""

    text: ClassVar[str] = f"FedYogi — {_ABOUT}"
    paper: ClassVar[str] = "arXiv:2003.00295"
    equations: ClassVar[Mapping[str, str]] = {"Algorithm 2, FedYogi": "`Server.aggregate`, `Server.second_moment`"}

    class Server(YogiServer):
        """Yogi on the mean of the updates."""
