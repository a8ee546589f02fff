"""FedAdamW — sites begin every round with their common second moments, and lean towards the last global step.

arXiv:2510.27486. A local step is x ← x − η·(m′/(√v′ + ε) + α·Δ_G + λ·x). m begins every round with 0; v begins with the
mean of all sites' v, of which a site sends one number per block. Δ_G = −(mean of the sites' last updates)/(K·η) is the
direction in which all moved together; the server sends it along. The server takes the plain mean.

- A block is one tensor of the network, as usual for convolutions; the paper cuts transformers finer.
- The local update as printed subtracts λ·x from the step, which would let weights grow: it is added, as in AdamW.
- v′ = v/(1 − β₂ᵗ) needs the number t of all steps so far, which sites with other numbers of steps, and parts that join
  late, do not share. 1 − β₂ᵗ is the second moment of a gradient that is always 1, and travels with v.
- K·η is the sum of a site's learning rates in its last round, as they follow a schedule; in its first, Δ_G is left out.
- η and λ are those of the experiment's optimiser, whichever it is (λ = 0.01 in the paper).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field

from panorgan.methods.base import Method, Payload, ServerRule, SiteRule, Updates, published
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.protocol import Tensors
from panorgan.methods.registry import register
from panorgan.methods.shared.prefixed import prefixed, under
from panorgan.methods.shared.server_average import STATISTICS
from panorgan.settings import Settings

_MOMENT, _MOMENTS, _DIRECTION, _PATH = "second_moment/", "second_moments", "direction/", "fedadamw/path"


class LocalAdamWSettings(Settings):
    """The settings of FedAdamW."""

    alpha: float = published(0.5, "0.5 (vision transformers)", "weight α of the last global step", ge=0)
    beta1: float = published(0.9, "0.9", "share of earlier gradients in their mean", ge=0, lt=1)
    beta2: float = published(0.999, "0.999", "share of earlier squares in their mean", ge=0, lt=1)
    epsilon: float = published(1e-8, "10⁻⁸", "added to √v′", gt=0)


class FedAdamWConfig(LocalAdamWSettings, FedAvgConfig):
    """The settings of FedAvg and of the local steps."""

    weighting: Literal["cases", "uniform"] = published("uniform", "uniform", "a site's weight in the mean: n_i, or 1")
    server_step: Literal[1] = Field(1, description="Δ_G takes the place of a longer step")


class LocalAdamWMethod(Method):
    """What its sites send."""

    tensors: ClassVar[Mapping[str, str]] = {
        f"{_MOMENT}*": "two numbers per tensor of the network: the mean square of its gradients, and how many steps "
        "that rests on."
    }


class LocalAdamWSite(SiteRule):
    """AdamW that begins with the federation's second moments. Teachers are trained with the experiment's optimiser."""

    config: FedAdamWConfig

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.path = 0.0
        """Σ η of the site's last round."""
        self.gone = 0.0
        """The same in this round, so far."""
        self.moments: dict[str, _Moments] = {}

    def before_round(self) -> None:
        """m = 0, and v of the federation in every block."""
        super().before_round()
        if not self.in_training:
            return
        own, self.gone = dict(self.model.named_parameters()), 0.0
        names = [name for name in blocks(self.model.state_dict()) if self.trains(name)]
        common = self.received.tensors.get(_MOMENTS, torch.zeros(len(names), 2)).clamp(min=0).tolist()
        self.moments = {name: _Moments(own[name], *pair) for name, pair in zip(names, common, strict=True)}

    @torch.no_grad()
    def move(self) -> None:
        """One step of all weights that have a gradient."""
        if not self.in_training:
            super().move()
            return
        groups = {weight: group for group in self.tools.optimizer.param_groups for weight in group["params"]}
        for name, weight in self.model.named_parameters():
            if weight.grad is None:
                continue
            step = self.moments[name].step(weight.grad, self.config)
            if self.path and _DIRECTION + name in self.received.tensors:
                step = step.sub(self.received.tensors[_DIRECTION + name], alpha=self.config.alpha / self.path)
            group = groups[weight]
            weight.sub_(step.add(weight, alpha=group["weight_decay"]), alpha=group["lr"])
        self.gone += self.tools.optimizer.param_groups[0]["lr"]

    def after_round(self) -> None:
        """Remember how far it went."""
        super().after_round()
        if self.in_training:
            self.path = self.gone

    def update(self) -> Payload:
        """The weights, and per block the mean of v."""
        whole = super().update()
        if not self.in_training:
            return whole
        means = {name: torch.tensor([float(one.v.mean()), one.v_sum]) for name, one in self.moments.items()}
        self.moments = {}
        return Payload({**whole.tensors, **prefixed(_MOMENT, means)}, whole.scalars)

    def state(self) -> Payload:
        """Σ η stays at the site."""
        whole = super().state()
        return Payload(whole.tensors, {**whole.scalars, _PATH: self.path})

    def load_state(self, state: Payload) -> None:
        """Restore it."""
        super().load_state(state)
        self.path = state.scalars.get(_PATH, 0.0)


class _Moments:
    """m and v of a weight, and what they would be of a gradient that is always 1."""

    def __init__(self, weight: torch.Tensor, v: float, v_sum: float) -> None:
        self.m, self.m_sum = torch.zeros_like(weight), 0.0
        self.v, self.v_sum = torch.full_like(weight, v), v_sum

    def step(self, gradient: torch.Tensor, config: LocalAdamWSettings) -> torch.Tensor:
        """m′/(√v′ + ε), with this gradient in both."""
        self.m.lerp_(gradient, 1 - config.beta1)
        self.m_sum += (1 - config.beta1) * (1 - self.m_sum)
        self.v.lerp_(gradient.square(), 1 - config.beta2)
        self.v_sum += (1 - config.beta2) * (1 - self.v_sum)
        return self.m / self.m_sum / ((self.v / self.v_sum).sqrt() + config.epsilon)


class LocalAdamWServer(ServerRule):
    """The mean of the weights, and of the second moments."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.moments: dict[str, torch.Tensor] = {}
        self.direction: dict[str, torch.Tensor] = {}
        """How far all weights moved in the last round."""

    def broadcast(self, site: str) -> Payload:
        """The weights, their last step, and v of the blocks in the order of their names."""
        whole = super().broadcast(site)
        if not (self.in_training and self.moments):
            return whole
        own = blocks(self.weights_of(site))
        moments = torch.stack([self.moments.get(key, torch.zeros(2)) for key in own])
        direction = {key: self.direction[key] for key in own if key in self.direction}
        return Payload({**whole.tensors, **prefixed(_DIRECTION, direction), _MOMENTS: moments}, whole.scalars)

    def expects(self, site: str) -> Mapping[str, torch.Tensor]:
        """The weights, and two numbers for each of their tensors."""
        own = blocks(self.weights_of(site)) if self.in_training else ()
        return {**super().expects(site), **{_MOMENT + key: torch.empty(2, device="meta") for key in own}}

    def aggregate(self, updates: Updates) -> None:
        """Both means; Δ_G is what the first one changed."""
        before = dict(self.weights)
        super().aggregate(updates)
        if not self.in_training:
            return
        self.direction = {key: self.weights[key] - before[key] for key in blocks(self.weights) if key in before}
        self.moments |= under(
            _MOMENT, updates.mean(lambda site, key: self.weight(site, key) if key.startswith(_MOMENT) else 0.0)
        )

    def state(self) -> Payload:
        """Moments and direction."""
        whole = super().state()
        own = {**prefixed(_MOMENT, self.moments), **prefixed(_DIRECTION, self.direction)}
        return Payload({**whole.tensors, **own}, whole.scalars)

    def load_state(self, state: Payload) -> None:
        """Restore them."""
        super().load_state(state)
        self.moments, self.direction = under(_MOMENT, state.tensors), under(_DIRECTION, state.tensors)


def blocks(weights: Tensors) -> Iterable[str]:
    """The tensors that can be trained, by name, sorted."""
    return sorted(key for key, value in weights.items() if value.is_floating_point() and not key.endswith(STATISTICS))


@register("fedadamw", config=FedAdamWConfig)
class FedAdamW(LocalAdamWMethod):
    """Local AdamW steps with second moments, and a direction, that sites share."""

    paper: ClassVar[str] = "arXiv:2510.27486"
    equations: ClassVar[Mapping[str, str]] = {
        "local step": "`Site.move`: m′/(√v′ + ε) + α·Δ_G + λ·x",
        "v, by blocks": "`Site.update`, `Server.aggregate`",
        "Δ_G": "`Server.aggregate`, divided by K·η in `Site.move`",
    }

    class Site(LocalAdamWSite):
        """Local steps on the partial loss."""

    class Server(LocalAdamWServer):
        """The plain mean, also of second moments."""
