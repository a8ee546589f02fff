"""The weights of sites when their teachers' certainty counts too (UFPS's UA, eq. 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SiteUncertainty:
    """A site's training cases, and mean and variance of its uncertainty bank, if it has one."""

    cases: float
    mean: float = math.nan
    variance: float = math.nan

    @property
    def has_bank(self) -> bool:
        """Whether mean and variance are valid: numbers, and none below 0 (which would gain weight)."""
        return all(math.isfinite(number) and number >= 0 for number in (self.mean, self.variance))


def uncertainty_weights(
    sites: Mapping[str, SiteUncertainty], mean_temperature: float = 0.05, variance_temperature: float = 0.001
) -> dict[str, float]:
    """Eq. 7: ⅓ (softmax_i(−μ_i/τ^μ) + softmax_i(−σ_i/τ^σ) + n_i/Σn), σ the variance; they add up to 1.

    A site without a bank counts by its cases in all three terms; the others share the rest of each.
    """
    total = math.fsum(site.cases for site in sites.values())
    by_cases = {name: site.cases / total for name, site in sorted(sites.items())}
    banks = {name: site for name, site in sorted(sites.items()) if site.has_bank}
    left = math.fsum(by_cases[name] for name in banks)
    by_mean = _softmax({name: -site.mean / mean_temperature for name, site in banks.items()})
    by_variance = _softmax({name: -site.variance / variance_temperature for name, site in banks.items()})
    return {
        name: (left * by_mean[name] + left * by_variance[name] + share) / 3 if name in banks else share
        for name, share in by_cases.items()
    }


def _softmax(values: Mapping[str, float]) -> dict[str, float]:
    largest = max(values.values(), default=0.0)
    powers = {name: math.exp(value - largest) for name, value in values.items()}
    total = math.fsum(powers.values())
    return {name: power / total for name, power in powers.items()}
