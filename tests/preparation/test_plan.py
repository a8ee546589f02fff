"""Settings and the sites' numbers become one plan for all."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from panorgan.preparation.plan import Plan, PlanSettings, proposed_patch
from panorgan.preparation.site_statistics import SiteStatistics


def site(cases=4, extent=(300.0, 300.0, 200.0), **ranges) -> SiteStatistics:
    return SiteStatistics(cases, cases, (1.0, 1.0, 2.0), extent, ranges)


def test_what_is_said_holds_and_the_rest_is_pooled() -> None:
    sites = {"a": site(liver=(32.0, 48.0))}
    assert PlanSettings().resolve(sites) == Plan(spacing_mm=(1, 1, 2), intensity="window", window_hu=(32, 48))
    said = PlanSettings(spacing_mm=(3, 3, 3), window_hu=(-160, 240), crop="body", image_interpolation="cubic")
    plan = said.resolve(sites)
    assert (plan.spacing_mm, plan.window_hu, plan.crop, plan.image_interpolation) == (
        (3, 3, 3),
        (-160, 240),
        "body",
        "cubic",
    )
    zscore = PlanSettings(spacing_mm=(1, 1, 1), intensity="zscore")
    assert not zscore.measures
    assert zscore.resolve({}) == Plan(spacing_mm=(1, 1, 1), intensity="zscore")
    assert PlanSettings(spacing_mm=(1, 1, 1), intensity="window").measures
    assert not PlanSettings(spacing_mm=(1, 1, 1), intensity="window", window_hu=(0, 1)).measures


def test_a_plan_is_settings_with_nothing_left_open() -> None:
    plan = Plan(intensity="zscore", window_hu=(0, 1))
    assert not plan.measures
    assert plan.resolve({}) is plan
    with pytest.raises(ValidationError):
        Plan(spacing_mm="pooled")


@pytest.mark.parametrize("wrong", [{"spacing_mm": (0, 1, 1)}, {"window_hu": (5, 5)}, {"spacing_mm": "median"}])
def test_impossible_settings_are_refused(wrong) -> None:
    with pytest.raises(ValidationError):
        PlanSettings(**wrong)


def test_a_proposed_patch_fits_scan_and_memory() -> None:
    # 300 × 300 × 200 mm at 1 × 1 × 2 mm are 300 × 300 × 100 voxels: too many for a patch, so the long sides shrink.
    patch = proposed_patch(Plan(spacing_mm=(1, 1, 2)), {"a": site()}, (16, 16, 16))
    assert all(size % 16 == 0 for size in patch)
    assert 0.5 * 128**3 < np.prod(patch) < 1.3 * 128**3
    assert patch[0] == patch[1]
    assert abs(patch[0] * 1 - patch[2] * 2) <= 32
    small = proposed_patch(Plan(spacing_mm=(1, 1, 1)), {"a": site(extent=(35, 51, 35))}, (8, 8, 8))
    assert small == (32, 48, 32)
    # Thick slices: 90 mm of 10 mm; the network halves that axis once.
    thick = proposed_patch(Plan(spacing_mm=(2, 2, 10)), {"a": site(extent=(240, 260, 90))}, (8, 8, 2))
    assert thick == (120, 128, 8)
    slices = proposed_patch(Plan(spacing_mm=(2, 2, 10)), {"a": site(extent=(240, 260, 90))}, (8, 8), sliced=2)
    assert slices == (120, 128, 1)


def test_no_site_sets_the_proposed_patch_alone() -> None:
    sites = {name: site(4) for name in "ab"}
    plan = Plan(spacing_mm=(2, 2, 2), window_hu=(0, 100))
    honest = proposed_patch(plan, {**sites, "c": site(4)}, (16, 16, 16))
    assert proposed_patch(plan, {**sites, "c": site(10_000, extent=(10.0, 10.0, 10.0))}, (16, 16, 16)) == honest
