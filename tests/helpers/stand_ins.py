"""Sites that answer without data or training: for what a coordinator does with their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from panorgan.anatomy import Vocabulary
from panorgan.federation.coordinator import Coordinator, CoordinatorSetup
from panorgan.federation.events import EventLog
from panorgan.federation.message import Message
from panorgan.federation.settings import TrainingSettings
from panorgan.federation.tasks import Task, answer_meta
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.registry import find_method
from panorgan.networks import UNetSettings

Train = Callable[[Mapping[str, torch.Tensor], Task], Mapping[str, torch.Tensor]]
NETWORK = UNetSettings(features=(4, 8))


def noise(seed: int, size: float = 0.01) -> Train:
    """Training as a small step in a direction of its own."""

    def train(weights: Mapping[str, torch.Tensor], task: Task) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + task.round_info.round)
        return {
            key: value + size * torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
            for key, value in weights.items()
        }

    return train


@dataclass
class StandIn:
    """Introduces itself with `cases`, and answers with what `train` makes of the received weights, and `numbers`."""

    name: str
    train: Train
    cases: float = 4.0
    introduction: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    organs: tuple[str, ...] = ("liver",)

    def handle(self, request: bytes) -> bytes:
        """The answer."""
        message = Message.from_bytes(request)
        task = Task.from_meta(message.meta)
        meta = answer_meta(task, self.name)
        if task.kind == "join":
            annotated = {f"annotated/{organ}": self.cases for organ in self.organs}
            return Message({}, {"train_cases": self.cases, **annotated, **self.introduction}, meta).to_bytes()
        return Message(self.train(message.tensors, task), {"cases": self.cases, **self.numbers}, meta).to_bytes()


def stand_in_coordinator(sites, folder, method="fedavg", config=None, training=None, **setup) -> Coordinator:
    """A coordinator of these sites; `config` is the method's, `training` the experiment's."""
    chosen = find_method(method)
    folder.mkdir(parents=True, exist_ok=True)
    settings = TrainingSettings(**{"rounds": 1, "validate_every": 0, "outlier_factor": None, **(training or {})})
    return Coordinator.begin(
        CoordinatorSetup(
            "run", Vocabulary(["liver"]), chosen(chosen.Config(**(config or {}))), NETWORK, settings, **setup
        ),
        LocalTransport({site.name: site for site in sites}),
        folder,
        EventLog(folder / "events.jsonl"),
    )
