"""SCAFFOLD — control variates remove the drift of a site's own data from its steps. arXiv:1910.06378

Every site has a control variate c_i, the server has their mean c. A local step follows g − c_i + c. Option II of the
paper computes the new c_i = c_i − c + (x − y_i)/(K·η) from the distance covered in K steps. For the plain gradient
steps that the paper assumes, that is exactly the mean of the raw gradients g of the round, which is what is computed
here: it stays correct with momentum, Adam, clipping and a changing learning rate. The control variates double the
payload.

c must stay the mean of the c_i, or every later step is biased. So a site changes its c_i only when the server
confirms that the change arrived (an answer may be lost or refused), and the server keeps the sum of the c_i, to which
a site that joins later adds zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from panorgan.methods.base import Method, Payload, Updates, published
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.registry import register
from panorgan.methods.shared.acknowledged import AcknowledgedSite, AcknowledgingServer
from panorgan.methods.shared.prefixed import prefixed, under
from panorgan.preparation.batch import Batch

_PREFIX = "control/"
_NEXT = "next_control/"


class ScaffoldConfig(FedAvgConfig):
    """SCAFFOLD has no settings of its own; the paper averages without weights."""

    weighting: Literal["cases", "uniform"] = published("uniform", "uniform", "a site's weight in the mean: n_i, or 1")


@register("scaffold", config=ScaffoldConfig)
class Scaffold(Method):
    """FedAvg with control variates against client drift."""

    paper: ClassVar[str] = "arXiv:1910.06378"
    equations: ClassVar[Mapping[str, str]] = {
        "eq. 3, local step": "`Site.step`: g − c_i + c",
        "eq. 4, option II": "`Site.after_round`: the mean raw gradient of the round",
        "eq. 5, server": "`Server.aggregate`: c + Σ Δc_i / N",
    }
    tensors: ClassVar[Mapping[str, str]] = {
        f"{_PREFIX}*": "how the site's mean gradient of this round differs from that of the round before."
    }

    class Site(AcknowledgedSite):
        """Steps with the drift removed."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.control = self._zeros()
            """c_i, as the server knows it."""
            self.next_control: dict[str, torch.Tensor] = {}
            """The new c_i once the server confirms it."""
            self.drift: dict[str, torch.Tensor] = {}
            self.sums: dict[str, torch.Tensor] = {}
            self.steps = 0

        def before_round(self) -> None:
            """Load the weights and c; reset the gradients of the last round."""
            super().before_round()
            if not self.in_training:
                return
            if self.next_control and self.was_acknowledged:
                self.control = self.next_control
            self.next_control = {}
            self.drift = {
                name: self.received.tensors[_PREFIX + name] - own
                for name, own in self.control.items()
                if _PREFIX + name in self.received.tensors  # absent: no site has sent any yet
            }
            self.sums, self.steps = self._zeros(), 0

        def step(self, batch: Batch) -> dict[str, torch.Tensor]:
            """Follow g − c_i + c; teachers are trained by plain steps."""
            if not self.in_training:
                return super().step(batch)
            self.prepare(batch)
            loss = self.compute_gradients(batch)
            self.steps += 1
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    self.sums[name] += parameter.grad
                if name in self.drift:
                    # Where this site has no labels the gradient is 0: it follows the others.
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad = gradient + self.drift[name]
            self.apply_gradients()
            return {"loss": loss}

        def after_round(self) -> None:
            """c_i becomes the mean gradient of the round."""
            super().after_round()
            if not self.in_training:
                return
            self.next_control = {name: total / self.steps for name, total in self.sums.items()}
            self.sums, self.drift = {}, {}

        def update(self) -> Payload:
            """The weights, and the change of the control variate."""
            whole = super().update()
            if not self.in_training:
                return whole
            changes = {_PREFIX + name: new - self.control[name] for name, new in self.next_control.items()}
            return Payload({**whole.tensors, **changes}, whole.scalars)

        def state(self) -> Payload:
            """The control variate stays at the site."""
            whole = super().state()
            own = prefixed(_PREFIX, self.control)
            following = prefixed(_NEXT, self.next_control)
            return Payload({**whole.tensors, **own, **following}, whole.scalars)

        def load_state(self, state: Payload) -> None:
            """Restore it; a part that the network gained since begins with zero."""
            super().load_state(state)
            for name, zeros in self._zeros().items():
                self.control[name] = state.tensors.get(_PREFIX + name, zeros)
                self.next_control[name] = state.tensors.get(_NEXT + name, zeros)

        def _zeros(self) -> dict[str, torch.Tensor]:
            """Of what this site trains."""
            parameters = self.model.named_parameters()
            return {name: torch.zeros_like(value.detach()) for name, value in parameters if self.trains(name)}

    class Server(AcknowledgingServer):
        """The mean of the weights, and of the control variates."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.sums: dict[str, torch.Tensor] = {}
            """Per weight Σ w_i·c_i over the sites that train it."""
            self.control: dict[str, torch.Tensor] = {}

        def broadcast(self, site: str) -> Payload:
            """The weights, and c."""
            whole, own = super().broadcast(site), self.weights_of(site)
            control = {_PREFIX + name: value for name, value in self.control.items() if name in own}
            return Payload({**whole.tensors, **control}, whole.scalars)

        def expects(self, site: str) -> Mapping[str, torch.Tensor]:
            """Weights, and a change of c for each of them that can be trained."""
            own = self.weights_of(site) if self.in_training else {}
            changes = {_PREFIX + key: value.to("meta") for key, value in own.items() if value.is_floating_point()}
            return {**super().expects(site), **changes}

        def aggregate(self, updates: Updates) -> None:
            """x ← mean of y_i, c ← c + Σ Δc_i / N, where N counts all sites that train the weight."""
            super().aggregate(updates)
            if not self.in_training:
                return
            for site in updates.sites:
                for key in updates.keys(site):
                    if key.startswith(_PREFIX):
                        name, change = key.removeprefix(_PREFIX), updates.tensor(site, key)
                        known = self.sums.get(name, torch.zeros_like(change)).double()
                        self.sums[name] = (known + self.weight(site, name) * change.double()).to(change.dtype)
            self._find_means()

        def _find_means(self) -> None:
            totals: dict[str, float] = {}
            for site in self.federation.sites:
                for name in self.weights_of(site):
                    totals[name] = totals.get(name, 0.0) + self.weight(site, name)
            self.control = {name: value / totals[name] for name, value in self.sums.items()}

        def state(self) -> Payload:
            """The sum of all c_i."""
            whole = super().state()
            return Payload({**whole.tensors, **prefixed(_PREFIX, self.sums)}, whole.scalars)

        def load_state(self, state: Payload) -> None:
            """Restore it; c is their mean over the sites that take part now."""
            super().load_state(state)
            self.sums = under(_PREFIX, state.tensors)
            self._find_means()
