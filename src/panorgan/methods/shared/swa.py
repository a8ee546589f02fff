"""Stochastic weight averaging over rounds, at the server. A piece for methods (`fedasam`, presets).

SWA (arXiv:1803.05407) averages the models of late rounds; their mean lies in a flatter minimum than any of them.
Training itself continues from the last model: the mean is validated and delivered, but not broadcast. A server rule
inherits `AveragesRounds` before the rule whose models it averages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from panorgan.methods.base import Method, ServerRule, published
from panorgan.methods.protocol import Payload, RoundInfo, Updates
from panorgan.settings import Settings

_PREFIX = "swa/"


class SWASettings(Settings):
    """Which rounds are averaged. The published values are those of FedASAM."""

    swa_start: float | None = published(
        0.75, "0.75", "share of the rounds after which global models are averaged; `null` for no averaging", ge=0, lt=1
    )
    swa_cycle: int = published(
        2, "10 (CIFAR-10)", "rounds between two models in the mean; the last round is always included", ge=1
    )


class RoundAverage:
    """The mean of the global models at the end of every late cycle of rounds.

    Parameters
    ----------
    start : share of the rounds after which models count; None for never.
    cycle : rounds between two models that count. They are counted back from the last round, so that the last model is
        always included, however short the run.
    """

    def __init__(self, start: float | None, cycle: int) -> None:
        self.start, self.cycle = start, cycle
        self.weights: dict[str, torch.Tensor] = {}
        """The mean so far; empty before the first model that counts."""
        self.models: dict[str, int] = {}
        """Per key, the number of models in its mean: fewer for a part that came with a late site."""

    def counts(self, round_info: RoundInfo) -> bool:
        """Whether the model after this round is averaged."""
        late = self.start is not None and round_info.progress > self.start
        return late and (round_info.rounds - round_info.round) % self.cycle == 0

    @torch.no_grad()
    def add(self, weights: Mapping[str, torch.Tensor], round_info: RoundInfo) -> None:
        """Add the model of a round to the mean, if the round ends a cycle: m ← m + (w − m)/n.

        Running statistics are averaged like weights, as between sites; a server has no images to measure them again.
        Counters are not averaged: the last one is kept.
        """
        if not self.counts(round_info):
            return
        for key, value in weights.items():
            number = self.models[key] = self.models.get(key, 0) + 1
            if number == 1 or not value.is_floating_point():
                self.weights[key] = value.detach().clone()
            else:
                # New tensors: callers may still hold the mean of an earlier round.
                known = self.weights[key].double()
                self.weights[key] = (known + (value.double() - known) / number).to(value.dtype)

    def over(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The given weights, replaced by the mean where there is one."""
        return {key: self.weights.get(key, value) for key, value in weights.items()}

    def state(self) -> Payload:
        """What must survive a restart; its names do not clash with those of other rules."""
        tensors = {_PREFIX + key: value for key, value in self.weights.items()}
        return Payload(tensors, {_PREFIX + key: float(number) for key, number in self.models.items()})

    def load(self, state: Payload) -> None:
        """Restore what `state` returned; other entries are ignored."""
        own = {key: value for key, value in state.tensors.items() if key.startswith(_PREFIX)}
        self.weights = {key.removeprefix(_PREFIX): value for key, value in own.items()}
        self.models = {key.removeprefix(_PREFIX): int(state.scalars[key]) for key in own}


class SWAMethod(Method):
    """A method whose server averages rounds."""

    def module_starts(self, rounds: int) -> Mapping[str, int]:
        """The first round whose model is in the mean, besides other modules that begin late."""
        assert isinstance(self.config, SWASettings)
        average = RoundAverage(self.config.swa_start, self.config.swa_cycle)
        counted = (number for number in range(1, rounds + 1) if average.counts(RoundInfo("train", number, rounds)))
        first = next(counted, None)
        return {**super().module_starts(rounds), **({} if first is None else {"SWA": first})}


class AveragesRounds(ServerRule):
    """Delivers the mean over late rounds."""

    config: SWASettings  # type: ignore[assignment]  # besides those of the rule that it averages

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.average = RoundAverage(self.config.swa_start, self.config.swa_cycle)

    def aggregate(self, updates: Updates) -> None:
        """Every training round counts, even if sites were missing."""
        super().aggregate(updates)
        if self.in_training:
            self.average.add(self.weights, self.round_info)

    def delivered(self) -> Mapping[str, torch.Tensor]:
        """The mean over rounds, once there is one."""
        return self.average.over(self.weights)

    def state(self) -> Payload:
        """The rule's state, and the mean so far."""
        whole, average = super().state(), self.average.state()
        return Payload({**whole.tensors, **average.tensors}, {**whole.scalars, **average.scalars})

    def load_state(self, state: Payload) -> None:
        """Restore them."""
        super().load_state(state)
        self.average.load(state)
