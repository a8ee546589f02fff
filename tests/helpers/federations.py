"""Coordinators and site workers on the tiny phantom federation, and a transport that can be tampered with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from panorgan.anatomy import Vocabulary
from panorgan.config import Experiment
from panorgan.federation.coordinator import Coordinator, CoordinatorSetup
from panorgan.federation.events import Event, EventLog
from panorgan.federation.message import Message
from panorgan.federation.site import SiteWorker
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.base import Method
from panorgan.workflows.execute import build_workers
from panorgan.workflows.prepare import prepare
from panorgan.workflows.run import Run

CPU = torch.device("cpu")
ALL = ["liver", "spleen", "kidney_left", "kidney_right"]
THREE: dict[str, Any] = {
    "sites": [
        {"name": "north", "annotated": ["liver"], "cases": 3, "spacing_mm": [14, 14, 14]},
        {"name": "south", "annotated": ALL, "cases": 3, "spacing_mm": [14, 14, 14]},
        {"name": "west", "annotated": ["liver"], "cases": 3, "spacing_mm": [14, 14, 14]},
    ]
}


def make_workers(experiment: Experiment, folder: Path, method: Method | None = None) -> dict[str, SiteWorker]:
    workers = build_workers(experiment, prepare(experiment), Run(folder), CPU, EventLog())
    for worker in workers.values():
        worker.setup = replace(worker.setup, method=method or worker.setup.method)
    return workers


def make_coordinator(
    experiment: Experiment,
    folder: Path,
    transport,
    heard: list[Event] | None = None,
    method: Method | None = None,
    **more: Any,
) -> Coordinator:
    """`more` goes into the coordinator's setup."""
    setup = CoordinatorSetup(
        "test-run",
        Vocabulary(experiment.vocabulary),
        method or experiment.build_method(),
        experiment.network,
        experiment.training,
        experiment.seed,
        experiment=experiment.agreement().fingerprint(),
        **more,
    )
    folder.mkdir(parents=True, exist_ok=True)
    listeners = (heard.append,) if heard is not None else ()
    return Coordinator.begin(setup, transport, folder, EventLog(folder / "events.jsonl", listeners))


class Tampering(LocalTransport):
    """Changes answers on their way; `drop` sites stay silent."""

    def __init__(self, workers, change: Callable[[str, bytes], bytes] | None = None, drop: Sequence[str] = ()) -> None:
        super().__init__(workers)
        self.change, self.drop = change, drop
        self.asked: list[str] = []

    def exchange(self, sites, make_request, on_reply, deadline=None):
        def changed(site: str, answer: bytes) -> None:
            meta = Message.from_bytes(answer).meta
            trains = str(meta.get("answers", "")).startswith("train")
            on_reply(site, self.change(site, answer) if self.change and trains else answer)

        present = [site for site in sites if site not in self.drop]
        self.asked += present
        super().exchange(present, make_request, changed)


Meddle = Callable[[str, str, bytes], Iterable[tuple[str, bytes]]]
"""Takes a site, the kind of question and the true answer; gives what arrives instead: senders and answers."""


class Meddling(LocalTransport):
    """Puts a man in the middle between sites and coordinator; sites in `absent` cannot be reached."""

    def __init__(self, workers, meddle: Meddle = lambda site, kind, answer: [(site, answer)]) -> None:
        super().__init__(workers)
        self.meddle, self.absent = meddle, set()
        self.asked: list[tuple[str, str]] = []

    @property
    def sites(self):
        return tuple(site for site in super().sites if site not in self.absent)

    def exchange(self, sites, make_request, on_reply, deadline=None):
        def meddle(site: str, answer: bytes) -> None:
            kind = Message.from_bytes(answer).meta["answers"].split("/")[0]
            self.asked.append((kind, site))
            for sender, content in self.meddle(site, kind, answer):
                on_reply(sender, content)

        super().exchange([site for site in sites if site not in self.absent], make_request, meddle)


def run(experiment: Experiment, folder: Path, rounds: int | None = None, method: Method | None = None) -> Coordinator:
    workers = make_workers(experiment, folder, method)
    coordinator = make_coordinator(experiment, folder, LocalTransport(workers), method=method)
    coordinator.run(rounds)
    return coordinator


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
