"""UFPS's modules: who is active when, and in which rounds masks are made."""

from __future__ import annotations

import pytest
import torch
from ufps_pieces import FixedNetwork, enter, make_batch, site_of

from panorgan.methods.protocol import RoundInfo
from panorgan.methods.ufps import MEAN, UFPS, VARIANCE, UFPSConfig
from panorgan.methods.ufps import method as ufps_module
from panorgan.methods.ufps.phases import active, fills_bank, rounds_of
from panorgan.methods.ufps.sparse_masks import LOCAL


def active_in(site: UFPS.Site, round_: int, rounds: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The modules that leave a trace in a round of one step."""
    seen: set[str] = set()
    for name, module in (("adaptive_rce", "aRCE"), ("cmidg", "SAM")):
        original = getattr(ufps_module, name)

        def traced(*arguments, original=original, module=module):
            seen.add(module)
            return original(*arguments)

        monkeypatch.setattr(ufps_module, name, traced)
    enter(site, round_, rounds)
    seen |= {"GMT"} if site.global_model is not None else set()
    site.step(make_batch())
    seen |= {"WS"} if site.weights is not None else set()
    site.after_round()
    assert site.global_model is None, "between rounds it takes no room"
    seen |= {"UA"} if {MEAN, VARIANCE} <= site.update().scalars.keys() else set()
    monkeypatch.undo()
    return seen


LATE = {"aRCE", "GMT", "UA", "SAM"}
PHASES = {
    # rounds of the run; round → what is active then
    5: {1: set(), 2: {"aRCE"}, 3: LATE, 5: LATE},
    10: {1: set(), 2: {"WS"}, 3: {"WS"}, 4: {"aRCE"}, 5: {"aRCE"}, 6: LATE, 10: LATE},
    100: {1: set(), 2: {"WS"}, 39: {"WS"}, 40: {"aRCE"}, 59: {"aRCE"}, 60: LATE, 100: LATE},
    500: {9: set(), 10: {"WS"}, 199: {"WS"}, 200: {"aRCE"}, 299: {"aRCE"}, 300: LATE},
}


@pytest.mark.parametrize("rounds", PHASES)
def test_what_is_active_when(rounds, monkeypatch):
    """The paper's rounds of 500 are shares: from r ≥ share·R on. WS waits for one round at least, to fill the bank."""
    site = site_of(FixedNetwork(torch.zeros(2, 3, 2, 2)))
    found = {r: active_in(site, r, rounds, monkeypatch) for r in PHASES[rounds]}
    assert found == PHASES[rounds]
    assert found == {r: active(site.config, RoundInfo("train", r, rounds)) for r in found}, "as the table says"


@pytest.mark.parametrize(
    ("rounds", "settings", "starts"),
    [
        (500, {}, {"WS": 10, "aRCE": 200, "GMT": 300, "UA": 300, "SAM": 300}),  # the paper's
        (60, {}, {"WS": 2, "aRCE": 24, "GMT": 36, "UA": 36, "SAM": 36}),
        (60, {"main_teacher": False, "uncertainty_aware": "none", "sharpness": "none"}, {"WS": 2, "aRCE": 24}),
        (5, {}, {"aRCE": 2, "GMT": 3, "UA": 3, "SAM": 3}),  # too short for WS
    ],
)
def test_when_each_module_that_is_on_begins(rounds, settings, starts):
    assert UFPS(UFPSConfig(**settings)).module_starts(rounds) == starts


def test_outside_of_training_nothing_is_active():
    assert active(UFPSConfig(), RoundInfo("pretrain", 10, 10)) == set()


def test_a_module_that_is_off_has_no_rounds():
    assert rounds_of("WS", UFPSConfig(), 500) == list(range(10, 200))
    assert rounds_of("WS", UFPSConfig(weight_schedule="none"), 500) == []
    assert rounds_of("WS", UFPSConfig(schedule_start=0), 5) == [], "0.4 of 5 is over after the warm-up"
    assert rounds_of("SAM", UFPSConfig(), 500) == list(range(300, 501))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, list(range(1, 11))),
        ({"uncertainty_aware": "none"}, [1, 2, 3]),
        ({"uncertainty_aware": "none", "schedule_end": 0.2}, []),
        ({"uncertainty_aware": "none", "weight_schedule": "none"}, []),
    ],
)
def test_the_bank_is_filled_while_somebody_will_ask_it(config, expected):
    found = [r for r in range(1, 11) if fills_bank(UFPSConfig(**config), RoundInfo("train", r, 10))]
    assert found == expected


@pytest.mark.parametrize(
    ("start", "round_", "active"),
    [
        ({"schedule_start": 0.5, "schedule_end": 0.6}, 5, {"WS"}),
        ({"schedule_start": 0.5, "schedule_end": 0.6}, 6, {"aRCE", *LATE}),
        ({"reverse_ce_start": 0.9}, 8, {"GMT", "UA", "SAM"}),
        ({"main_teacher_start": 0.1}, 2, {"WS", "GMT"}),
        ({"uncertainty_start": 0.1}, 2, {"WS", "UA"}),
        ({"sharpness_start": 0.1}, 2, {"WS", "SAM"}),
        ({"sharpness": "none"}, 8, LATE - {"SAM"}),
        ({"rho": 0}, 8, LATE - {"SAM"}),
        ({"main_teacher": False}, 8, LATE - {"GMT"}),
        ({"uncertainty_aware": "none"}, 8, LATE - {"UA"}),
        ({"reverse_ce": False}, 8, LATE - {"aRCE"}),
        ({"weight_schedule": "none"}, 2, set()),
    ],
)
def test_every_module_has_its_own_switch_and_start(monkeypatch, start, round_, active):
    if round_ == 5:
        start = {**start, "reverse_ce_start": 0.6}
    site = site_of(FixedNetwork(torch.zeros(2, 3, 2, 2)), **start)
    assert active_in(site, round_, 10, monkeypatch) == active


@pytest.mark.parametrize(("every", "expected"), [(5, [12, 16]), (3, [12, 13, 16, 19]), (1, list(range(12, 21)))])
@pytest.mark.parametrize("sharpness", ["topk", "susam"])
def test_masks_are_made_in_the_first_round_of_sharpness_and_where_r_mod_so_many_is_1(every, expected, sharpness):
    """20 rounds, sharpness from 0.6 on. Only sUSAM sends its masks."""
    site = site_of(FixedNetwork(torch.zeros(2, 3, 2, 2)), sharpness=sharpness, mask_every=every)
    refreshed, sent = [], []
    for round_ in range(1, 21):
        enter(site, round_, 20)
        site.step(make_batch())
        refreshed += [round_] if site.refreshing else []
        sent += [round_] if LOCAL in site.update().tensors else []
    assert refreshed == expected
    assert sent == (expected if sharpness == "susam" else [])


def test_a_site_without_a_mask_makes_one_when_it_comes():
    """It missed round 12 of 20, and is back in 14: it need not wait for 16, and sends its mask at once."""
    site = site_of(FixedNetwork(torch.zeros(2, 3, 2, 2)))
    sent = []
    for round_ in (11, 14, 15, 16, 18):
        enter(site, round_, 20)
        site.step(make_batch())
        sent += [round_] if LOCAL in site.update().tensors else []
    assert sent == [14, 16]


def test_dense_kinds_have_no_masks():
    for sharpness in ("asam", "usam"):
        site = site_of(FixedNetwork(torch.zeros(2, 3, 2, 2)), sharpness=sharpness)
        enter(site, 20, 20)
        site.step(make_batch())
        assert site.masks.current is None
        assert not site.masks.state()
