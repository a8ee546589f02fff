"""A method that uses everything a method may use, in an installed package of its own. It computes nothing sensible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch

from panorgan.methods.base import Method, Payload, ServerRule, SiteRule, Stage, Updates
from panorgan.methods.registry import register


def _packed(bits: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.packbits(bits.cpu().numpy().ravel()))


def _unpacked(packed: torch.Tensor, count: int) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count)).bool()


def _left_out(keys: list[str], sites: list[str], site: str) -> set[str]:
    """Every site keeps other keys to itself: each third one, beginning at its own place."""
    return set(keys[sites.index(site) :: len(sites)]) if len(sites) > 1 else set()


@register("everything")
class Everything(Method):
    """Pretrain stage, keys that differ by site, bit-packed masks, float16, numbers, private and server state."""

    numbers: ClassVar[Mapping[str, str]] = {**Method.numbers, "steps_so_far": "steps of the site in all rounds"}
    tensors: ClassVar[Mapping[str, str]] = {"mask/*": "signs of the update, bit-packed", "half/*": "a small summary"}

    def stages(self, rounds: int) -> tuple[Stage, ...]:
        """One round on its own first."""
        return (Stage("pretrain", 1, validate=False), Stage("train", rounds))

    class Site(SiteRule):
        """Keeps a private vector that pulls on its loss, and part of its model."""

        def before_round(self) -> None:
            """Start from what was received, but keep what this site does not send."""
            self.before = {key: value.clone() for key, value in self.received.tensors.items()}
            private = getattr(self, "private", {})
            own = self.model.state_dict()
            self.model.load_state_dict({key: private.get(key, self.received.tensors[key]) for key in own})
            if not hasattr(self, "pull"):
                self.pull = torch.zeros(4, device=next(self.model.parameters()).device)
                self.steps = 0.0

        def loss(self, batch):
            """The usual one, scaled by the private vector and by a number from the server."""
            self.steps += 1
            return self.supervision(batch).mean() * (1 + self.pull.sum() + self.received.scalars["scale"])

        def after_round(self) -> None:
            """The private vector moves."""
            first = next(self.model.parameters()).detach().flatten()[:4]
            self.pull = 0.5 * self.pull + 0.01 * first + 0.001 * torch.rand(4, device=first.device)

        def update(self) -> Payload:
            """Most weights, signs of the update as bits, a float16 summary, and numbers."""
            state = self.model.state_dict()
            sites, name = sorted(self.federation.sites), self.facts.name
            hidden = _left_out(sorted(state), sites, name)
            self.private = {key: state[key].detach().clone() for key in hidden}
            sent = {key: value for key, value in state.items() if key not in hidden}
            signs = torch.cat([(state[key] > self.before[key]).flatten() for key in sorted(state)])
            summary = torch.stack([value.float().mean() for _, value in sorted(state.items())]).half()
            extras = {f"mask/{name}": _packed(signs), f"half/{name}": summary}
            numbers = {"cases": float(self.facts.train_cases), "steps_so_far": self.steps}
            return Payload({**sent, **extras}, numbers)

        def state(self) -> Payload:
            """Never leaves the site."""
            kept = {f"private/{key}": value for key, value in self.private.items()}
            return Payload({"pull": self.pull, **kept}, {"steps": self.steps})

        def load_state(self, state: Payload) -> None:
            """As it was saved."""
            self.pull, self.steps = state.tensors["pull"], state.scalars["steps"]
            self.private = {
                key.removeprefix("private/"): value
                for key, value in state.tensors.items()
                if key.startswith("private/")
            }

    class Server(ServerRule):
        """Averages what was sent, moved a little by the votes of the masks."""

        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            self.memory = torch.zeros(3)

        def broadcast(self, site: str) -> Payload:
            """Another number, and another small tensor, for every site."""
            order = sorted(self.federation.sites).index(site)
            gift = {f"gift/{site}": torch.full((2,), float(order)).half()}
            return Payload({**self.weights, **gift}, {"scale": 0.01 * (order + 1) + float(self.memory.sum())})

        def expects(self, site: str) -> Mapping[str, torch.Tensor]:
            """Weights but those the site keeps, and its own mask and summary."""
            keys, sites = sorted(self.weights), sorted(self.federation.sites)
            hidden = _left_out(keys, sites, site)
            count = sum(value.numel() for value in self.weights.values())
            extras = {
                f"mask/{site}": torch.empty(-(-count // 8), dtype=torch.uint8, device="meta"),
                f"half/{site}": torch.empty(len(keys), dtype=torch.float16, device="meta"),
            }
            return {**{key: self.weights[key] for key in keys if key not in hidden}, **extras}

        def aggregate(self, updates: Updates) -> None:
            """The mean, then a step where a majority of the masks says up."""
            super().aggregate(updates)
            keys = sorted(self.weights)
            count = sum(self.weights[key].numel() for key in keys)
            votes = sum(_unpacked(updates.tensor(site, f"mask/{site}"), count).float() for site in updates.sites)
            up = (votes * 2 > len(updates.sites)).float() * 1e-4
            sizes = [self.weights[key].numel() for key in keys]
            for key, part in zip(keys, up.split(sizes), strict=True):
                if self.weights[key].is_floating_point():
                    self.weights[key] = self.weights[key] + part.view(self.weights[key].shape)
            halves = sum(updates.tensor(site, f"half/{site}").float()[:3] for site in updates.sites)
            steps = sum(updates.scalars(site)["steps_so_far"] for site in updates.sites)
            self.memory = 0.9 * self.memory + 1e-4 * halves + 1e-5 * steps

        def state(self) -> Payload:
            """What the next round needs."""
            return Payload({"memory": self.memory})

        def load_state(self, state: Payload) -> None:
            """As it was saved."""
            if state.tensors:
                self.memory = state.tensors["memory"]
