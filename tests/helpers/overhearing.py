"""Sites whose messages are written down, and updates made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from federations import make_coordinator, make_workers

from panorgan.config import Experiment
from panorgan.federation.aggregation import SpooledUpdates
from panorgan.federation.coordinator import Coordinator
from panorgan.federation.message import Message, MessageFile
from panorgan.federation.site import SiteWorker
from panorgan.federation.transports.local import LocalTransport


class Overheard:
    """A site; `received` and `sent` are its training messages, one per round."""

    def __init__(self, worker: SiteWorker) -> None:
        self.worker = worker
        self.received: list[Message] = []
        self.sent: list[Message] = []

    def handle(self, request: bytes) -> bytes:
        answer = self.worker.handle(request)
        message = Message.from_bytes(request)
        if message.meta["task"] == "train":
            self.received.append(message)
            self.sent.append(Message.from_bytes(answer))
        return answer


def overheard(experiment: Experiment, folder: Path, **setup: Any) -> tuple[Coordinator, dict[str, Overheard]]:
    """A coordinator that has not begun, and its sites; `setup` as for `make_coordinator`."""
    sites = {name: Overheard(worker) for name, worker in make_workers(experiment, folder).items()}
    return make_coordinator(experiment, folder, LocalTransport(sites), **setup), sites


def spooled(folder: Path, updates: dict[str, dict[str, torch.Tensor]]) -> SpooledUpdates:
    """Updates as the coordinator finds them on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for site, tensors in updates.items():
        path = folder / f"{site}.safetensors"
        path.write_bytes(Message(tensors, {"cases": 1.0}).to_bytes())
        files[site] = MessageFile(path)
    return SpooledUpdates(files)
