"""UA's weights (eq. 7), by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panorgan.methods.ufps.uncertainty_weights import SiteUncertainty, uncertainty_weights


def test_three_sites_by_hand():
    """μ/τ = 1, 2, 3 and σ/τ = 2, 2, 1 with the paper's temperatures; 10, 30 and 60 cases."""
    found = uncertainty_weights(
        {
            "a": SiteUncertainty(10, 0.05, 0.002),
            "b": SiteUncertainty(30, 0.10, 0.002),
            "c": SiteUncertainty(60, 0.15, 0.001),
        }
    )
    e = math.e
    by_mean = [x / (1 + 1 / e + 1 / e**2) for x in (1, 1 / e, 1 / e**2)]  # 0.6652, 0.2447, 0.0900
    by_variance = [x / (2 / e + 1) for x in (1 / e, 1 / e, 1)]  # 0.2119, 0.2119, 0.5761
    expected = [(m + v + n) / 3 for m, v, n in zip(by_mean, by_variance, (0.1, 0.3, 0.6), strict=True)]
    assert list(found.values()) == pytest.approx(expected)
    assert list(found.values()) == pytest.approx([0.325728, 0.252223, 0.422049], abs=1e-6)


def test_temperatures():
    sites = {"a": SiteUncertainty(1, 0.0, 0.0), "b": SiteUncertainty(1, math.log(3), math.log(7))}
    found = uncertainty_weights(sites, mean_temperature=1.0, variance_temperature=1.0)
    assert found["a"] == pytest.approx((3 / 4 + 7 / 8 + 1 / 2) / 3)


def test_equal_sites_count_alike_and_one_site_counts_alone():
    alike = {name: SiteUncertainty(7, 0.3, 0.01) for name in "abc"}
    assert list(uncertainty_weights(alike).values()) == pytest.approx([1 / 3] * 3)
    assert uncertainty_weights({"a": SiteUncertainty(7, 0.3, 0.01)}) == {"a": pytest.approx(1.0)}


def test_a_site_without_a_bank_counts_by_its_cases():
    """b and c share the other half: ⅓ (½·¾ + ½·⅞ + ¼) and ⅓ (½·¼ + ½·⅛ + ¼)."""
    sites = {
        "a": SiteUncertainty(20),
        "b": SiteUncertainty(10, 0.0, 0.0),
        "c": SiteUncertainty(10, math.log(3), math.log(7)),
    }
    found = uncertainty_weights(sites, 1.0, 1.0)
    assert found["a"] == pytest.approx(0.5)
    assert found["b"] == pytest.approx((3 / 8 + 7 / 16 + 1 / 4) / 3)
    assert found["c"] == pytest.approx((1 / 8 + 1 / 16 + 1 / 4) / 3)
    assert uncertainty_weights({name: SiteUncertainty(n) for name, n in (("a", 1), ("b", 3))}) == {"a": 0.25, "b": 0.75}


numbers = st.floats(0, 1e6) | st.just(math.nan) | st.just(math.inf)


@given(st.dictionaries(st.text(max_size=3), st.tuples(st.integers(1, 500), numbers, numbers), min_size=1, max_size=6))
def test_weights_add_up_to_one_whoever_comes_first(reported):
    sites = {name: SiteUncertainty(*values) for name, values in reported.items()}
    found = uncertainty_weights(sites)
    assert math.fsum(found.values()) == pytest.approx(1.0)
    assert all(weight > 0 for weight in found.values())
    assert found == uncertainty_weights(dict(reversed(sites.items())))


@pytest.mark.parametrize("impossible", [SiteUncertainty(1, -5.0, 0.001), SiteUncertainty(1, 0.05, -5.0)])
def test_nobody_buys_weight_with_numbers_that_no_bank_has(impossible):
    honest = SiteUncertainty(1, 0.05, 0.001)
    found = uncertainty_weights({"a": honest, "b": honest, "liar": impossible})
    assert found["liar"] == pytest.approx(1 / 3)
