"""A teacher is the model of its best validated round: by hand, over a restart, and in a whole run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federations import make_coordinator, make_workers, run, same
from torch import nn
from ufps_pieces import FixedNetwork, site_of

from panorgan.anatomy import Vocabulary
from panorgan.federation import site as site_module
from panorgan.federation.scores import ValidationScores
from panorgan.federation.transports.local import LocalTransport
from panorgan.federation.validation import validation_scores
from panorgan.methods.base import Payload
from panorgan.methods.protocol import RoundInfo
from panorgan.methods.ufps import UFPS
from panorgan.networks import SegmentationNetwork

DICE = {1: 0.9, 2: 0.3, 3: 0.9, 4: 0.6, 5: 0.4}
"""By round. Rounds 1 and 3 are not validated, the last is."""


def pretraining(every: int = 2, has_cases: bool = True, **config: object) -> UFPS.Site:
    """A site whose model after round r is r everywhere."""
    site = site_of(FixedNetwork(torch.zeros(2, 3, 2, 2)), **config)
    site.tools.cases = ()
    site.tools.validate_every = every
    site.tools.validate = lambda network, organs: (
        {"liver": DICE[site.round_info.round]} if has_cases and organs == ("liver",) else {}
    )
    return site


def train(site: UFPS.Site, rounds: range) -> None:
    for round_ in rounds:
        site.round_info, site.received = RoundInfo("pretrain", round_, 5), Payload()
        site.before_round()
        nn.init.constant_(site.model.logits, float(round_))
        site.after_round()


def sent(site: UFPS.Site) -> float:
    (weights,) = {value.mean().item() for value in site.update().tensors.values()}
    return weights


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 4.0),
        ({"every": 1}, 1.0),
        ({"teacher_select": "last"}, 5.0),
        ({"every": 0}, 5.0),
        ({"has_cases": False}, 5.0),
    ],
    ids=["best of 2, 4 and 5", "of equals the first", "last", "never validated", "no validation cases"],
)
def test_the_best_validated_round_is_sent_and_kept(settings, expected):
    site = pretraining(**settings)
    train(site, range(1, 6))
    assert sent(site) == expected
    assert site.tools.tensor_store.get("teacher/a")["logits"].mean().item() == expected


def test_a_restart_forgets_no_better_round():
    """Round 4 was better than the last. Its weights are in the tensor store, how good it was in the site's state."""
    first = pretraining()
    train(first, range(1, 5))
    again = pretraining()
    again.tools.tensor_store = first.tools.tensor_store
    again.round_info = first.round_info
    again.load_state(first.state())
    train(again, range(5, 6))
    assert sent(again) == 4.0


def test_who_broke_off_sends_its_best_too():
    """It got as far as round 4, which was worse than round 3; then it is asked for its teacher."""
    site = pretraining(every=1)
    train(site, range(2, 5))
    site.round_info, site.received = RoundInfo("exchange", 1, 1), Payload(scalars={"send_teacher": 1.0})
    site.before_round()
    assert site.tools.tensor_store.get("teacher/a")["logits"].mean().item() == 3.0


def test_a_model_that_has_diverged_is_never_the_best():
    site = pretraining(every=1)
    train(site, range(2, 3))
    site.round_info, site.received = RoundInfo("pretrain", 3, 5), Payload()
    nn.init.constant_(site.model.logits, float("nan"))
    site.after_round()
    assert site.best_dice == 0.3


# -- in a run --------------------------------------------------------------------------------------------------------


class Claims(SegmentationNetwork):
    """Background 0.3, liver 0.35, spleen 0.35, everywhere."""

    def __init__(self) -> None:
        super().__init__(Vocabulary(["liver", "spleen"]), "softmax")
        self.weight = nn.Parameter(torch.zeros(1))


class Case:
    """All liver."""

    image = np.zeros((2, 2, 2), dtype=np.float16)
    spacing = (1.0, 1.0, 1.0)

    def masks(self):
        yield "liver", np.ones((2, 2, 2), dtype=bool)


def test_a_teacher_is_scored_as_it_is_asked():
    """Against everything else: 0.35 of liver is then less than 0.65 of anything else. Otherwise it leads."""

    def predict(network, image):
        return torch.tensor([0.3, 0.36, 0.34]).view(3, 1, 1, 1).repeat(1, 2, 2, 2)

    assert validation_scores(Claims(), [Case()], predict).dice == {"liver": 1.0}
    assert validation_scores(Claims(), [Case()], predict, ("liver",)).dice == {"liver": 0.0}
    assert validation_scores(Claims(), [Case()], predict, ("liver", "spleen")).dice == {"liver": 1.0}


TRAINING = {"rounds": 4, "validate_every": 1, "local_steps": 1}


@pytest.mark.parametrize("pieces", [False, True])
def test_teachers_of_a_run_are_those_of_their_best_rounds(tiny, tmp_path, monkeypatch, pieces):
    """Four rounds of pretrain, of which the second is said to be the best; also with a process for every round."""
    seen: dict[str, list[dict[str, torch.Tensor]]] = {"north": [], "south": []}
    original = site_module.validation_scores

    def scripted(network, cases, predict, taught=None):
        if taught is None:
            return original(network, cases, predict)
        models = seen["north" if taught == ("liver",) else "south"]
        models.append({key: value.clone() for key, value in network.state_dict().items()})
        assert original(network, cases, predict, taught).dice, "there are validation cases"
        return ValidationScores({"any": [0.2, 0.5, 0.1, 0.4][len(models) - 1]})

    monkeypatch.setattr(site_module, "validation_scores", scripted)
    experiment = tiny(method={"name": "fedavg_pl"}, training=TRAINING)
    if pieces:
        for _ in range(5):
            coordinator = run(experiment, tmp_path, rounds=1)
    else:
        coordinator = make_coordinator(experiment, tmp_path, LocalTransport(make_workers(experiment, tmp_path)))
        coordinator.run(rounds=5)
    for site, models in seen.items():
        assert len(models) == 4
        assert same(coordinator.tensor_store.get(f"teacher/{site}"), models[1])
