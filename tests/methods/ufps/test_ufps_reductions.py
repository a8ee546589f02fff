"""UFPS and its starred baselines with a module off or without effect: another method, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from federations import ALL, make_coordinator, make_workers, same

from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.ufps import UFPSConfig

OFF: dict[str, Any] = {
    "name": "ufps",
    "weight_schedule": "none",
    "reverse_ce": False,
    "main_teacher": False,
    "uncertainty_aware": "none",
    "sharpness": "none",
}
FROM_THE_START = {
    "schedule_start": 0,
    "schedule_end": 0.5,
    "reverse_ce_start": 0.5,
    "reverse_ce_weight": 1,
    "main_teacher_start": 0,
    "main_teacher_dice": 0,
    "uncertainty_start": 0,
    "sharpness_start": 0,
    "mask_every": 1,
}
"""In two rounds everything happens in both, but for WS: its first round is the second."""
ON = {"name": "ufps", **FROM_THE_START}
TRAINING = {"rounds": 2, "validate_every": 0, "local_steps": 2}
DEMANDING = {"norm": "batch", "dropout": 0.2}
"""Running statistics and random draws would show a pass too many."""


class Trials:
    """Runs of the tiny federation, each made once: the weights after every training round."""

    def __init__(self, tiny, folder) -> None:
        self.tiny, self.folder = tiny, folder
        self.made: dict[str, list[dict[str, torch.Tensor]]] = {}

    def __call__(self, method: dict[str, Any], network: dict[str, Any] | None = None, rounds: int = 2, **more: Any):
        method = {"pretrain": 0.5, **method}
        key = repr((sorted(method.items(), key=str), network, rounds, more))
        if key not in self.made:
            training = {**TRAINING, "rounds": rounds}
            experiment = self.tiny(method=method, network=network or {}, training=training, **more)
            folder = self.folder / str(len(self.made))
            coordinator = make_coordinator(experiment, folder, LocalTransport(make_workers(experiment, folder)))
            outcomes = []
            while not coordinator.finished:
                coordinator.run(rounds=1)
                if coordinator.rule.round_info.stage == "train":
                    outcomes.append(dict(coordinator.state.weights))
            assert len(outcomes) == rounds
            self.made[key] = outcomes
        return self.made[key]


@pytest.fixture(scope="module")
def trial(tiny, tmp_path_factory) -> Trials:
    return Trials(tiny, tmp_path_factory.mktemp("reductions"))


def all_same(first, second) -> bool:
    return all(same(one, other) for one, other in zip(first, second, strict=True))


def none_same(first, second) -> bool:
    return not any(same(one, other) for one, other in zip(first, second, strict=True))


# -- FedAvg* ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [OFF, {"name": "fedprox_pl", "mu": 0}, {"name": "fedasam_pl", "rho": 0, "swa_start": None}],
    ids=["ufps without modules", "fedprox_pl, μ = 0", "fedasam_pl, ρ = 0"],
)
def test_without_its_modules_it_is_fedavg_on_pseudo_labels(trial, method):
    assert all_same(trial(method, DEMANDING), trial({"name": "fedavg_pl"}, DEMANDING))


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedprox_pl", "mu": 1},
        {"name": "fedasam_pl", "swa_start": None},
        {**OFF, **FROM_THE_START, "main_teacher": True},
        {**OFF, **FROM_THE_START, "uncertainty_aware": "decoder"},
        {**OFF, **FROM_THE_START, "sharpness": "susam"},
        {**OFF, **FROM_THE_START, "reverse_ce": True},
    ],
    ids=["fedprox_pl", "fedasam_pl", "GMT", "UA", "sUSAM", "aRCE"],
)
def test_every_module_changes_something(trial, method):
    """So that what is the same above is the same for a reason."""
    plain = trial({"name": "fedavg_pl"})
    assert not all_same(trial(method), plain)


def test_ws_changes_what_follows_its_warm_up(trial):
    """Of three rounds it acts in the second: the first fills the bank, and is FedAvg*'s."""
    found = trial({**OFF, **FROM_THE_START, "schedule_end": 1, "weight_schedule": "tail_shift"}, rounds=3)
    plain = trial({"name": "fedavg_pl"}, rounds=3)
    assert same(found[0], plain[0])
    assert none_same(found[1:], plain[1:])


def test_a_main_teacher_that_nobody_has_scored_changes_nothing(trial):
    """No validation, no knowledge: all organs are left to the teachers."""
    guarded = {**OFF, **FROM_THE_START, "main_teacher": True, "main_teacher_dice": 0.5}
    assert all_same(trial(guarded), trial({"name": "fedavg_pl"}))


# -- sharpness -------------------------------------------------------------------------------------------------------


def test_without_a_radius_there_is_no_sharpness(trial):
    none = trial({**ON, "sharpness": "none"}, DEMANDING)
    assert all_same(trial({**ON, "rho": 0}, DEMANDING), none)
    assert none_same(trial(ON, DEMANDING), none)


def test_masks_that_hold_every_weight_change_nothing(trial):
    """T_L = 1, T_G = 0. Drawing no masks, or other masks, changes no augmented image and no dropout."""
    dense = trial({**ON, "sharpness": "usam"}, DEMANDING)
    for sparse in ("topk", "susam"):
        assert all_same(trial({**ON, "sharpness": sparse, "local_share": 1, "global_share": 0}, DEMANDING), dense)
    assert none_same(trial(ON, DEMANDING), dense)


def test_usam_on_images_as_they_are_is_asam(trial):
    asam = trial({**ON, "sharpness": "asam"}, DEMANDING)
    assert all_same(trial({**ON, "sharpness": "usam", "augmentation": {"blend": 0}}, DEMANDING), asam)
    assert none_same(trial({**ON, "sharpness": "usam"}, DEMANDING), asam)


def test_figure_8_on_images_as_they_are(trial):
    """Plain steps on such images are plain steps, and ascending and descending on them is ASAM, bit for bit."""
    as_they_are = {"augmentation": {"blend": 0}}
    plain, asam = (trial({**ON, "sharpness": kind}, DEMANDING) for kind in ("none", "asam"))
    for kind, same_as in (("augmented", plain), ("both", asam)):
        assert all_same(trial({**ON, "sharpness": kind, **as_they_are}, DEMANDING), same_as)
        assert none_same(trial({**ON, "sharpness": kind}, DEMANDING), same_as)
    assert none_same(trial({**ON, "sharpness": "random"}, DEMANDING), asam)


def test_running_statistics_are_those_of_real_images(trial):
    """Looking a hair's breadth away is a plain step, but for rounding; the pass on augmented images leaves no trace."""
    batch = {"norm": "batch"}
    plain = trial({**ON, "sharpness": "none"}, batch)[-1]
    for key, value in trial({**ON, "rho": 1e-9}, batch)[-1].items():
        torch.testing.assert_close(value, plain[key], rtol=0.05, atol=0.02, msg=key)


def test_asam_alone_is_the_step_of_fedasam_on_pseudo_labels(trial):
    """But for running statistics: theirs are of the pass at w, UFPS's of the pass on real images, which is at w + ε."""
    numbers = {"rho": 0.7, "eta": 0.001}
    ufps = trial({**OFF, "sharpness": "asam", "sharpness_start": 0, **numbers}, {"dropout": 0.2})
    assert all_same(trial({"name": "fedasam_pl", "swa_start": None, **numbers}, {"dropout": 0.2}), ufps)


def test_disputed_weights_matter_once_the_server_has_masks(trial):
    """T_G > 0 is top-k in the first round, when there is no M_G yet, and not in the second."""
    first, second = (trial({**ON, "sharpness": kind}, DEMANDING) for kind in ("topk", "susam"))
    assert same(first[0], second[0])
    assert not same(first[1], second[1])


# -- everything annotated --------------------------------------------------------------------------------------------


def knowing(*names: str) -> dict[str, Any]:
    cases = {"north": 5, "south": 4}
    sites = [{"name": n, "annotated": ALL, "cases": cases[n], "spacing_mm": [12, 12, 12]} for n in names]
    return {"sites": sites}


@pytest.mark.parametrize("names", [("north",), ("north", "south")])
def test_where_everything_is_annotated_teachers_have_no_say(trial, names):
    """However long they were trained, and whatever WS, UA and GMT would do with them: ground truth always wins.

    It is full supervision by Dice + BCE, not FedAvg of the package, whose loss is Dice + cross-entropy.
    """
    common = {"phantom": knowing(*names), "rounds": 3}  # WS acts in the second
    plain = trial({"name": "fedavg_pl"}, **common)
    assert all_same(trial({"name": "fedavg_pl", "pretrain": 1.0}, **common), plain)
    modules = {"weight_schedule": "tail_shift", "schedule_end": 1, "uncertainty_aware": "all", "main_teacher": True}
    assert all_same(trial({**OFF, **FROM_THE_START, **modules}, **common), plain)
    assert none_same(trial({"name": "fedavg_pl", "pretrain": 1.0}), trial({"name": "fedavg_pl"})), "they have elsewhere"


def test_the_switches_here_are_all_there_are():
    """A module that is added must come in here too."""
    kept = {"name", "larger_first", "merge", "pretrain", "teacher_cache", "dice_weight", "ce_weight", "weighting"}
    kept |= {"teacher_select", "organ_parts", "server_step", "dice_over", "unlabelled"}
    numbers = {"main_teacher_gain", "disagreement", "scale_biases"}
    numbers |= {"schedule_tail", "main_teacher_share", "mean_temperature", "variance_temperature", "rho", "eta"}
    numbers |= {"local_share", "global_share", "gradient_momentum", "augmentation", "perturbed_share"}
    numbers |= {"encoder_supervision"}  # off wherever it is not asked for
    assert set(UFPSConfig.model_fields) == (kept | numbers | set(OFF) | set(FROM_THE_START)) - {"name"}
