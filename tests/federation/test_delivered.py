"""Weights that are delivered may differ from those that are broadcast, and other tensors may come along."""

from __future__ import annotations

import torch
from federations import make_coordinator, make_workers

from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.base import Method, MethodConfig, Payload, ServerRule, SiteRule


class RunningMean(Method):
    """Delivers the mean of all rounds' weights; broadcasts the newest, with a tensor of its own beside them."""

    name = "running_mean"

    class Site(SiteRule):
        """Finds the extra tensor among what it received, not in its model."""

        def before_round(self) -> None:
            super().before_round()
            assert self.received.tensors["round_before"].item() == self.round_info.round - 1

    class Server(ServerRule):
        """Keeps the sum of all rounds as state."""

        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            self.total: dict[str, torch.Tensor] = {}
            self.count = 0.0

        def broadcast(self, site: str) -> Payload:
            return Payload({**self.weights, "round_before": torch.tensor([self.count])})

        def aggregate(self, updates) -> None:
            super().aggregate(updates)
            self.total = {k: self.total.get(k, torch.zeros_like(v)) + v for k, v in self.weights.items()}
            self.count += 1

        def delivered(self) -> dict[str, torch.Tensor]:
            return {k: v / self.count for k, v in self.total.items()} if self.count else self.weights

        def state(self) -> Payload:
            return Payload(self.total, {"count": self.count})

        def load_state(self, state: Payload) -> None:
            self.total, self.count = dict(state.tensors), state.scalars.get("count", 0.0)


def test_the_delivered_weights_are_those_the_rule_says_also_for_an_earlier_best_round(tiny, tmp_path):
    experiment = tiny(training={"rounds": 3, "validate_every": 1, "select": "best"})
    method = RunningMean(MethodConfig())
    coordinator = make_coordinator(
        experiment, tmp_path, LocalTransport(make_workers(experiment, tmp_path, method)), method=method
    )
    seen = []
    for _ in range(3):
        coordinator.run(rounds=1)
        seen.append({k: v.clone() for k, v in coordinator.rule.weights.items()})
    chosen, delivered = coordinator.delivered_weights()
    assert chosen == int(coordinator.state.best["round"])
    for key, value in delivered.items():
        expected = sum(weights[key] for weights in seen[:chosen]) / chosen
        torch.testing.assert_close(value, expected)
    assert "round_before" not in delivered
