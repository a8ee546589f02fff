"""The uncertainty bank: one value per case, its numbers, and a restart that changes nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused

from panorgan.errors import RunError
from panorgan.methods.protocol import Payload
from panorgan.methods.ufps.uncertainty_bank import UncertaintyBank

CASES = ("c", "a", "b", "d")


def filled() -> UncertaintyBank:
    bank = UncertaintyBank(CASES)
    bank.put(("a", "b"), torch.tensor([0.1, 0.3]))
    bank.put(("c", "a"), torch.tensor([0.6, 0.3]))
    return bank


def test_numbers_by_hand():
    """a was seen twice: 0.3, 0.3, 0.6 are left."""
    bank = filled()
    found = bank.statistics()
    assert len(bank) == 3
    assert found.mean.item() == pytest.approx(0.4)
    assert found.variance.item() == pytest.approx((0.01 + 0.01 + 0.04) / 3, rel=1e-5)
    assert found.minimum.item() == pytest.approx(0.3)
    assert found.maximum.item() == pytest.approx(0.6)
    # sorted 0.3, 0.3, 0.6: the 0.7 quantile lies at place 1.4
    assert bank.quantile(0.7).item() == pytest.approx(0.3 + 0.4 * 0.3)


def test_normalised_by_hand():
    norm = filled().statistics().normalised(torch.tensor([0.3, 0.4, 0.6, 1.0]))
    assert norm.tolist() == pytest.approx([-1 / 3, 0, 2 / 3, 2], abs=1e-6)


@pytest.mark.parametrize("seen", [{}, {"a": 0.2}, {"a": 0.2, "b": 0.2}])
def test_without_spread_everything_is_normal(seen):
    bank = UncertaintyBank(CASES)
    for case, value in seen.items():
        bank.put((case,), torch.tensor([value]))
    assert bank.statistics().normalised(torch.tensor([0.0, 0.2, 9.0])).tolist() == [0.0, 0.0, 0.0]


def test_an_empty_bank_has_zeros():
    for bank in (UncertaintyBank(CASES), UncertaintyBank(())):
        assert len(bank) == 0
        found = bank.statistics()
        assert [x.item() for x in (found.mean, found.variance, found.minimum, found.maximum)] == [0.0] * 4
        assert bank.quantile(0.7).item() == 0.0
        assert bank.as_payload().scalars == {}


def test_it_does_not_grow():
    bank = UncertaintyBank(CASES)
    for step in range(50):
        bank.put(("a", "b"), torch.tensor([step / 50, 0.5]))
    assert len(bank) == 2
    assert bank.statistics().maximum.item() == pytest.approx(49 / 50)


def test_a_case_twice_in_a_batch_keeps_the_last():
    bank = UncertaintyBank(CASES)
    bank.put(("a", "a"), torch.tensor([0.1, 0.2]))
    assert bank.as_payload().scalars == {"uncertainty/a": pytest.approx(0.2)}


def test_gradients_stay_outside():
    bank = UncertaintyBank(CASES)
    bank.put(("a",), torch.tensor([0.5], requires_grad=True))
    assert not bank.statistics().mean.requires_grad


def test_a_stranger_is_refused():
    with refused("case-not-in-bank", RunError) as caught:
        filled().put(("x",), torch.tensor([0.1]))
    assert "'x'" in caught.value.what
    assert caught.value.fix


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=12), st.floats(0, 1), st.randoms())
def test_numbers_are_those_of_numpy_whichever_case_came_first(values, share, random):
    bank = UncertaintyBank(str(number) for number in range(12))
    cases = [(str(number), value) for number, value in enumerate(values)]
    random.shuffle(cases)
    for case, value in cases:
        bank.put((case,), torch.tensor([value]))
    found = bank.statistics()
    assert found.mean.item() == pytest.approx(np.mean(values), rel=1e-5)
    assert found.variance.item() == pytest.approx(np.var(values), rel=1e-4, abs=1e-7)
    assert (found.minimum.item(), found.maximum.item()) == (min(values), max(values))
    assert bank.quantile(share).item() == pytest.approx(np.quantile(values, share), rel=1e-5, abs=1e-7)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.floats(0, 1, width=32)), max_size=30), st.randoms())
def test_a_restart_changes_no_bit(seen, random):
    """Through JSON, with the numbers in another order, and other numbers of the rule beside them."""
    bank = UncertaintyBank("abcdefgh")
    for case, value in seen:
        bank.put((case,), torch.tensor([value]))
    pairs = [*bank.as_payload().scalars.items(), ("round", 3.0)]
    random.shuffle(pairs)
    names = list("abcdefgh")
    random.shuffle(names)
    again = UncertaintyBank.from_payload(Payload(scalars=json.loads(json.dumps(dict(pairs)))), names)
    for name in ("mean", "variance", "minimum", "maximum"):
        assert torch.equal(getattr(again.statistics(), name), getattr(bank.statistics(), name))
    assert torch.equal(again.quantile(0.7), bank.quantile(0.7))
    assert again.as_payload() == bank.as_payload()


def test_cases_that_are_gone_are_forgotten():
    again = UncertaintyBank.from_payload(filled().as_payload(), ("a", "e"))
    assert again.as_payload().scalars == {"uncertainty/a": pytest.approx(0.3)}
