"""Learning rates over a stage: by hand, and how much of their mass lies late."""

from __future__ import annotations

import pytest

from panorgan.federation.settings import OptimizerSettings


def rates(progress: list[float], **settings: object) -> list[float]:
    optimizer = OptimizerSettings(learning_rate=2.0, **settings)
    return [optimizer.rate(p) for p in progress]


def late_mass(**settings: object) -> float:
    """The share of the learning rate that is spent after 0.6 of a stage."""
    optimizer = OptimizerSettings(learning_rate=1.0, **settings)
    spent = [optimizer.rate(step / 10000) for step in range(10000)]
    return sum(spent[6000:]) / sum(spent)


def test_a_cosine_that_starts_anew():
    """One restart: two halves, each from the full rate (1 + cos 0)/2 over (1 + cos π/2)/2 to nothing."""
    found = rates([0.0, 0.25, 0.499999, 0.5, 0.75, 0.999999], schedule="cosine_restarts", restarts=1)
    assert found == pytest.approx([2.0, 1.0, 0.0, 2.0, 1.0, 0.0], abs=1e-6)


def test_cycles_begin_after_the_warm_up():
    """A fifth of the stage warms up; the rest is two cycles of 0.4."""
    settings = {"schedule": "cosine_restarts", "restarts": 1, "warmup": 0.2}
    assert rates([0.2, 0.4, 0.6 + 1e-9, 0.8], **settings) == pytest.approx([2.0, 1.0, 2.0, 1.0])
    assert rates([0.1], **settings)[0] == pytest.approx(2.0 * 0.101 / 0.201)


def test_without_restarts_it_is_a_cosine():
    progress = [0.0, 0.3, 0.9]
    assert rates(progress, schedule="cosine_restarts", restarts=0) == rates(progress, schedule="cosine")


def test_restarts_leave_late_modules_their_share():
    """UFPS's late modules begin at 0.6 of the rounds."""
    assert late_mass(schedule="cosine_restarts") == pytest.approx(0.40, abs=1e-3)
    assert late_mass(schedule="cosine_restarts", warmup=0.02) == pytest.approx(0.40, abs=0.01)
    assert late_mass(schedule="poly") == pytest.approx(0.175, abs=0.005)
    assert late_mass(schedule="cosine") == pytest.approx(0.10, abs=0.005)
