"""FedExP — the server goes the farther along the mean update, the less sites agree. arXiv:2301.09604

η = max(1, Σ pᵢ‖Δᵢ‖² / (2·(‖Δ‖² + ε))), Δ = Σ pᵢΔᵢ the mean of the updates Δᵢ; pᵢ is 1/M in the paper, and a site's
share of the cases in its released code and by default. What is delivered is the mean of the last two models, because
the steps are long. panorgan's other averaging methods take a more careful step (`server_step: fedexp`):
there the median over sites stands for the mean of the norms, and no step is longer than a site's. This is the method
as published.

Output rows are averaged over the organs' owners and not extrapolated; nor is a part that one site alone trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field

from panorgan.methods.base import Method, ServerRule, Updates, published
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.registry import register
from panorgan.methods.shared.memory import Remembers
from panorgan.methods.shared.server_average import published_extrapolation, stepped


class FedExPConfig(FedAvgConfig):
    """The settings of FedAvg, and ε."""

    epsilon: float = published(1e-3, "10⁻³", "ε added to ‖Δ‖², which keeps the step from growing without bound", ge=0)
    server_step: Literal["fedexp"] = Field("fedexp", description="the step as published")


@register("fedexp", config=FedExPConfig)
class FedExP(Method):
    """FedAvg with extrapolation at the server, as published."""

    paper: ClassVar[str] = "arXiv:2301.09604"
    equations: ClassVar[Mapping[str, str]] = {
        "server step η": "`published_extrapolation`",
        "section 3, last two iterates": "`Server.delivered`",
    }

    class Server(Remembers, ServerRule):
        """Extrapolates; delivers the mean of the last two models."""

        memory: ClassVar[Mapping[str, str]] = {"before": "before/"}
        config: FedExPConfig
        before: dict[str, torch.Tensor]
        """The model before the last step."""

        def aggregate(self, updates: Updates) -> None:
            """The step, and the model before it."""
            self.before = dict(self.weights)
            super().aggregate(updates)

        def extrapolated(self, updates: Updates, means: Mapping[str, torch.Tensor]) -> float:
            """η."""
            return published_extrapolation(updates, self.weights, means, self.config.epsilon, self.weight)

        def delivered(self) -> Mapping[str, torch.Tensor]:
            """The mean of the last two models."""
            known = {key: value for key, value in self.before.items() if value.is_floating_point()}
            return {**self.weights, **stepped(known, {key: self.weights[key] for key in known}, 0.5)}
