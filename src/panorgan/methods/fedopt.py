"""FedOpt — the server follows the sites' mean update with Adam or Yogi, as if it were a gradient. arXiv:2003.00295

Both keep a mean m of the updates and an estimate v of their squares, weight by weight, so that weights which sites
seldom move take steps as large as others. FedYogi lets v fall more slowly than FedAdam does.

As published, neither corrects m and v for their beginning at 0 and τ². Statistics of batch normalisation are averaged
as they are. Where none of an organ's owners has answered, a part of its own stays as it is, and its row of a common
output layer has an update of 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field

from panorgan.methods.base import Method, published
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.registry import register
from panorgan.methods.shared.server_step import StepsAtServer
from panorgan.settings import Settings

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


class AdaptiveServer(StepsAtServer):
    """w ← w + η·m/(√v + τ), with m ← β₁·m + (1 − β₁)·Δ and v of Adam; Δ is the mean of the updates."""

    memory: ClassVar[Mapping[str, str]] = {"m": "fedopt/m/", "v": "fedopt/v/"}
    config: FedOptConfig
    m: dict[str, torch.Tensor]
    v: dict[str, torch.Tensor]

    def second_moment(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """β₂·v + (1 − β₂)·Δ²."""
        return self.config.beta2 * v + (1 - self.config.beta2) * square

    def step_along(self, key: str, delta: torch.Tensor) -> torch.Tensor:
        """η·m/(√v + τ)."""
        kind, start = self.weights[key].dtype, torch.zeros_like(self.weights[key])
        m = self.m.get(key, start).double()
        v = self.v.get(key, start + self.config.tau**2).double()
        m = self.config.beta1 * m + (1 - self.config.beta1) * delta
        v = self.second_moment(v, delta.square())
        self.m[key], self.v[key] = m.to(kind), v.to(kind)
        return self.config.server_rate * m / (v.sqrt() + self.config.tau)


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
    equations: ClassVar[Mapping[str, str]] = {"Algorithm 2, FedAdam": "`Server.step_along`, `Server.second_moment`"}

    class Server(AdaptiveServer):
        """Adam on the mean of the updates."""


@register("fedyogi", config=FedOptConfig)
class FedYogi(Method):
    """FedAvg whose server takes Yogi's steps."""

    text: ClassVar[str] = f"FedYogi — {_ABOUT}"
    paper: ClassVar[str] = "arXiv:2003.00295"
    equations: ClassVar[Mapping[str, str]] = {"Algorithm 2, FedYogi": "`Server.step_along`, `Server.second_moment`"}

    class Server(YogiServer):
        """Yogi on the mean of the updates."""
