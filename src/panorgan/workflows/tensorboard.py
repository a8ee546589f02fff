"""Scalars for TensorBoard, written next to the run's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from panorgan.federation.events import Event, Listener


def tensorboard_listener(folder: Path) -> Listener:
    """A listener that turns round events into scalars; opened at the first round, so that importing stays fast.

    The end of the run closes the file and ends its thread.
    """
    writers: list[Any] = []

    def listen(event: Event) -> None:
        if event.kind == "finished":
            while writers:
                writers.pop().close()
        if event.kind != "round":
            return
        if not writers:
            from torch.utils.tensorboard import SummaryWriter

            writers.append(SummaryWriter(str(folder)))
        writer, number = writers[0], event.facts["number"]
        for site, numbers in event.facts["sites"].items():
            for name, value in numbers.items():
                writer.add_scalar(f"{name}/{site}", value, number)
        for name, value in event.facts.get("server", {}).items():
            writer.add_scalar(f"{name}/server", value, number)
        for site, scores in (event.facts["validation"] or {}).items():
            for structure, value in scores.items():
                writer.add_scalar(f"validation_dice/{site}/{structure}", value, number)
        writer.flush()

    return listen
