"""The model that training starts from (`training.start_from`): read, compared with the agreement, copied into a kit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from panorgan.agreement import Agreement
from panorgan.data.channels import plain_name
from panorgan.errors import ConfigError, RunError
from panorgan.federation.start_settings import CARD, WEIGHTS, StartSettings, model_folder, weights_hash
from panorgan.federation.starting_weights import refuse_other_shape
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.preparation.plan import Plan
from panorgan.workflows.model_bundle import load_model


def starting_network(start: StartSettings, folder: Path) -> SegmentationNetwork:
    """The network with its weights, which must be those of the agreement."""
    place = model_folder(folder)
    if weights_hash(place) != start.sha256:
        raise RunError(
            "The model to start from is another one than agreed.",
            code="start-changed",
            where=str(place / WEIGHTS),
            why=f"the experiment says SHA-256 {start.sha256}",
            fix="Put the model back, or begin a new run that starts from this one.",
        )
    return load_model(place, "cpu").network


def reader_of(agreement: Agreement, folder: Path | None = None) -> Callable[[], SegmentationNetwork] | None:
    """How the coordinator reads the model, from `folder` or where the experiment found it; None without one."""
    start = agreement.training.start_from
    place = start and (folder or start.folder)
    return partial(starting_network, start, place) if start and place else None


def check_start(agreement: Agreement) -> None:
    """Refuse a model that is gone, has changed or has another network, before anything is computed."""
    start = agreement.training.start_from
    if start is None or start.folder is None:
        return
    model = load_model(start.folder, "cpu")
    method = agreement.build_method()
    refuse_other_shape(method.network_settings(agreement.network), UNetSettings(**model.card["network"]))
    _refuse_moved_channels(agreement.channels, model.channels)
    starting_network(start, start.folder)


def _refuse_moved_channels(here: Sequence[str], there: Sequence[str]) -> None:
    """The first layer reads channels by their place: one that moved would be read as another."""
    places = {plain_name(name): place for place, name in enumerate(there)}
    moved = [name for place, name in enumerate(here) if places.get(plain_name(name), place) != place]
    if moved:
        raise ConfigError(
            f"The model to start from has the channel {moved[0]!r} at another place.",
            code="start-channel-order",
            where="training.start_from",
            why=f"the channels are {', '.join(there)} there and {', '.join(here)} here",
            fix="List 'channels' in the order of the model; the folders need not change.",
        )


def other_channels(agreement: Agreement) -> str:
    """A sentence where the model's channels have other names; empty where they agree or are not named."""
    start = agreement.training.start_from
    if start is None or start.folder is None:
        return ""
    there, here = load_model(start.folder, "cpu").channels, agreement.channels
    pairs = [(old, new) for old, new in zip(there, here, strict=False) if plain_name(old) != plain_name(new)]
    if not pairs:
        return ""
    differ = ", ".join(f"{new} here is {old} there" for old, new in pairs)
    return (
        f"The model to start from knows other channels: {differ}. "
        "If these are other sequences, it has to adapt; if they only have other names, nothing need be done."
    )


def other_plan(agreement: Agreement, plan: Plan) -> str:
    """A sentence where scans are prepared otherwise than the model knows them; empty where they are not."""
    start = agreement.training.start_from
    if start is None or start.folder is None:
        return ""
    known = load_model(start.folder, "cpu").plan
    differ = [name for name in type(plan).model_fields if getattr(known, name) != getattr(plan, name)]
    if not differ:
        return ""
    there = ", ".join(f"{name} {getattr(known, name)} there, {getattr(plan, name)} here" for name in differ)
    return (
        f"The model to start from knows scans that were prepared otherwise ({there}): it has to adapt. "
        "Copy its plan into the section 'plan' to keep what it learned."
    )


def copy_start(agreement: Agreement, folder: Path) -> None:
    """Copy the model into the server's kit: its sites receive it from there with their first request."""
    start = agreement.training.start_from
    if start is None or start.folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CARD, WEIGHTS):
        shutil.copyfile(model_folder(start.folder) / name, folder / name)
