"""The finished model at a site: checked against the agreement before it replaces the previous one, which is kept."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from panorgan.agreement import Agreement
from panorgan.anatomy import Vocabulary
from panorgan.data.labels import CONVENTIONS, Activation
from panorgan.errors import MessageError
from panorgan.federation.agreement_checks import check_model, check_plan
from panorgan.federation.checks import is_finite
from panorgan.federation.failures import NotAgreedError
from panorgan.federation.tasks import Task
from panorgan.methods.protocol import Federation, Tensors
from panorgan.workflows.model_bundle import OWN_ORGANS, later_entries, save_model
from panorgan.workflows.model_card import INPUT_CHANNELS

_LARGEST_CARD = 10**6


def check_delivered(task: Task, weights: Tensors, agreement: Agreement, plan: Mapping[str, Any] | None) -> None:
    """Refuse a model that the agreed experiment cannot have produced. `plan` is the run's, if the site has a record."""
    card = task.card
    if card is None:
        raise MessageError("A model arrived without its card.", code="card-missing")
    federation = Federation(Vocabulary(agreement.vocabulary), task.sites)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        network = agreement.build_method().build_network(agreement.network, federation)
    for name, wanted in _expected_card(task, agreement, network.channels, network.activation).items():
        if card.get(name) != wanted:
            raise _refused(
                f"its card has another {name!r}",
                f"{card.get(name)!r:.200}, agreed is {wanted!r:.200}",
                code="wrong-card",
            )
    if OWN_ORGANS in card and not agreement.organs:
        raise _refused("its card describes organs", "the agreed experiment has none of its own", code="wrong-card")
    if INPUT_CHANNELS in card and not agreement.channels:
        raise _refused("its card names channels", "the agreed experiment names none", code="wrong-card")
    if own := sorted({"format", "panorgan"} & card.keys()):
        raise _refused("its card has fields that the site itself writes", ", ".join(own), code="reserved-card-field")
    check_plan(card.get("plan"), agreement.plan)
    if plan is not None and card["plan"] != plan:
        raise _refused("its plan is not that of the run", f"{card['plan']!r:.300}", code="plan-changed")
    if not _is_plain(card) or len(json.dumps(card)) > _LARGEST_CARD:
        raise _refused(
            "its card is too large, or holds control characters", f"{len(json.dumps(card))} characters", code="bad-card"
        )
    check_model(weights, network.state_dict())
    if bad := sorted(key for key, value in weights.items() if not is_finite(value)):
        raise _refused("it holds values that are not finite", f"{bad[0]!r}", code="not-finite")


def replace_model(folder: Path, previous: Path, weights: Mapping[str, torch.Tensor], card: Mapping[str, Any]) -> None:
    """Put a model into its folder; the existing one becomes the previous one. An equal model changes nothing.

    A kill in between leaves the old model in `previous`; the coordinator sends the new one again.
    """
    arriving = folder.with_name(f".{folder.name}.arriving")
    save_model(arriving, dict(weights), dict(card))
    if folder.is_dir():
        if _same(folder, arriving):
            shutil.rmtree(arriving)
            return
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    arriving.rename(folder)


def _expected_card(task: Task, agreement: Agreement, channels: Any, activation: Activation) -> dict[str, Any]:
    """The expected card of a model of this agreement, as after a round trip through JSON."""
    expected = {
        "organs": agreement.vocabulary,
        "channels": channels,
        "convention": CONVENTIONS[activation],
        "method": agreement.method,
        "network": agreement.network.as_json(),
        "inference": {
            "patch_size": agreement.training.sampling.patch_size,
            "overlap": agreement.training.overlap,
        },
        "postprocess": agreement.postprocess,
        "sites": {name: facts.as_json() for name, facts in task.sites.items()},
        "run": task.run,
        **later_entries(agreement),
    }
    return dict(json.loads(json.dumps(expected)))


def _is_plain(content: Any) -> bool:
    """Whether all texts in a JSON value are printable."""
    if isinstance(content, Mapping):
        return all(_is_plain(part) for pair in content.items() for part in pair)
    if isinstance(content, list):
        return all(_is_plain(part) for part in content)
    return not isinstance(content, str) or content.isprintable()


def _same(first: Path, second: Path) -> bool:
    names = sorted(path.name for path in second.iterdir())
    there = names == sorted(path.name for path in first.iterdir())
    return there and not any(filecmp.cmpfiles(first, second, names, shallow=False)[1:])


def _refused(what: str, why: str, *, code: str) -> NotAgreedError:
    return NotAgreedError(
        f"The delivered model is not the agreed one: {what}.",
        code=code,
        why=why,
        fix="It was not kept; the existing model stays. Ask the coordinator what was sent.",
    )
