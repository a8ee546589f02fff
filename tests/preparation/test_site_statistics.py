"""What sites measure, and what their numbers amount to."""

from __future__ import annotations

import numpy as np
import pytest
from refusing import refused

from panorgan.preparation.measure import measure_case
from panorgan.preparation.plan import Plan
from panorgan.preparation.site_statistics import (
    CaseMeasurements,
    SiteStatistics,
    pooled_intensity,
    pooled_spacing,
    pooled_window,
)

BINS = 256


def counts(**bins: int) -> np.ndarray:
    """`hu_40=7`: seven voxels in the bin that holds 40 HU (bins of 16 from -1024); `m` for minus."""
    table = np.zeros(BINS, dtype=np.int64)
    for name, count in bins.items():
        hu = int(name.removeprefix("hu_").replace("m", "-"))
        table[(hu + 1024) // 16] = count
    return table


def site(cases=4, ct=None, spacing=(1.0, 1.0, 2.0), extent=(300.0, 300.0, 200.0), **ranges) -> SiteStatistics:
    return SiteStatistics(cases, cases if ct is None else ct, spacing, extent, ranges)


def test_a_case_is_measured(make_case) -> None:
    hu = np.full((10, 10, 4), -1000.0)
    hu[2:8, 2:8] = -100.0
    liver, spleen = np.zeros(hu.shape, bool), np.zeros(hu.shape, bool)
    liver[3:5, 3:5, 1], spleen[6, 6, 2] = True, True
    hu[liver], hu[spleen] = 60.0, 5000.0
    measured = measure_case(make_case("a", hu, {"liver": liver, "spleen": spleen}, np.diag([2.0, 3, 5, 1])), Plan())
    assert measured.spacing_mm == pytest.approx((2, 3, 5))
    assert measured.extent_mm == pytest.approx((20, 30, 20))
    assert measured.is_ct
    np.testing.assert_array_equal(measured.hu_counts["liver"], counts(hu_60=4))
    beyond = counts()
    beyond[-1] = 1
    np.testing.assert_array_equal(measured.hu_counts["spleen"], beyond)


def test_mr_has_no_hounsfield_units(make_case) -> None:
    signal = np.random.default_rng(0).uniform(0, 900, (8, 8, 8))
    measured = measure_case(make_case("a", signal, {"liver": signal > 400}), Plan())
    assert not measured.is_ct
    assert measured.hu_counts == {}


@pytest.mark.parametrize("modality", ["CT", "MR"])
def test_the_extent_is_that_of_the_cropped_body(make_case, modality) -> None:
    voxels = np.full((60, 60, 60), -1000.0 if modality == "CT" else 0.0)
    voxels[20:40, 20:40, 20:40] = 40.0
    case = make_case("a", voxels, {"liver": voxels > 0})
    whole, cropped = (measure_case(case, Plan(crop=crop)).extent_mm for crop in ("none", "body"))
    assert whole == (60, 60, 60)
    assert all(20 + 2 * 8 <= mm <= 20 + 2 * 12 for mm in cropped)


def test_a_site_tells_coarse_medians_and_ranges() -> None:
    cases = [
        CaseMeasurements((mm, 1.0, 5.0), (104 * mm, 80.0, 3.0), ct, {"liver": counts(hu_40=n)})
        for mm, ct, n in [(0.7, True, 1), (0.9012, True, 2), (4.0, False, 4)]
    ]
    reported = SiteStatistics.of(cases)
    assert (reported.cases, reported.ct_cases) == (3, 2)
    assert reported.spacing_mm == (0.9, 1, 5)
    assert reported.extent_mm == (90, 80, 10)  # whole centimetres, at least one
    assert reported.hu_ranges == {"liver": (32, 48)}
    back = CaseMeasurements.from_json(cases[0].as_json())
    assert back.spacing_mm == (0.7, 1.0, 5.0)
    np.testing.assert_array_equal(back.hu_counts["liver"], counts(hu_40=1))


def reported(structure: str, **bins: int) -> tuple[float, float]:
    """The range that a site sends of a structure with these voxels."""
    case = CaseMeasurements((1, 1, 1), (10, 10, 10), True, {structure: counts(**bins)})
    return SiteStatistics.of([case]).hu_ranges[structure]


def test_a_range_leaves_out_half_a_percent_at_either_end() -> None:
    # 1000 voxels: five may be left out at an end. -100 lies in the bin from -112, 40 in the bin that ends at 48.
    assert reported("liver", hu_m1000=4, hu_m100=500, hu_40=492, hu_3000=4) == (-112.0, 48.0)
    # Six are too many to leave out: -200 lies in the bin from -208.
    assert reported("liver", hu_m200=6, hu_m100=500, hu_40=490, hu_3000=4) == (-208.0, 48.0)


@pytest.mark.parametrize("gas", [6, 300, 900])
@pytest.mark.parametrize("structure", ["stomach", "colon", "colon_tumour", "oesophagus"])
def test_gas_in_the_gut_does_not_widen_its_range_however_much_it_is(structure, gas) -> None:
    assert reported(structure, hu_m960=gas, hu_40=1000 - gas) == (-256.0, 48.0)


def test_what_is_made_of_air_keeps_its_whole_range() -> None:
    for structure in ("lung", "lung_lower_lobe_left", "lung_tumour"):
        assert reported(structure, hu_m850=300, hu_40=700) == (-864.0, 48.0)
    # A name that the catalogue does not have is judged by its voxels: most of a bronchus is air.
    assert reported("bronchus", hu_m850=501, hu_40=499) == (-864.0, 48.0)
    assert reported("abscess", hu_m850=499, hu_40=501) == (-256.0, 48.0)
    # No tissue at all: the range is what there is.
    assert reported("stomach", hu_m960=10) == (-960.0, -944.0)


def test_three_sites_with_gas_in_the_stomach_pool_a_window_of_tissue() -> None:
    measured = [
        CaseMeasurements(
            (1, 1, 1), (10, 10, 10), True, {"stomach": counts(hu_m960=gas, hu_40=70), organ: counts(hu_90=9)}
        )
        for gas, organ in ((30, "liver"), (90, "spleen"), (5, "kidney"))
    ]
    assert pooled_window({str(n): SiteStatistics.of([case]) for n, case in enumerate(measured)}) == (-256.0, 96.0)


def test_what_leaves_a_site_are_named_numbers_and_nothing_is_lost() -> None:
    reported = site(liver=(-112.0, 240.0), spleen=(0.0, 160.0))
    numbers = reported.as_numbers()
    assert all(isinstance(number, float) for number in numbers.values())
    assert len(numbers) == 2 + 6 + 4
    assert SiteStatistics.from_numbers(numbers) == reported


@pytest.mark.parametrize(
    "wrong",
    [
        {"plan/cases": 0.0},
        {"plan/ct_cases": 5.0},
        {"plan/spacing_mm/R": 0.0},
        {"plan/extent_mm/S": float("nan")},
        {"plan/cases": float("inf")},
        {"plan/hu_low/liver": 300.0},
        {"plan/hu_low/spleen": 0.0},  # without its other end
    ],
)
def test_numbers_that_cannot_be_are_refused_with_the_site(wrong) -> None:
    numbers = site(liver=(-112.0, 240.0)).as_numbers() | wrong
    with refused("implausible-statistics") as caught:
        SiteStatistics.from_numbers(numbers, "north")
    assert caught.value.where == "north"


def test_large_sites_weigh_more_in_the_spacing() -> None:
    sites = {"a": site(10, spacing=(0.8, 0.8, 5.0)), "b": site(3, spacing=(1.0, 0.6, 1.0))}
    assert pooled_spacing(sites) == (0.8, 0.8, 5.0)
    sites = {"b": site(3, spacing=(1.0, 0.6, 1.0)), "c": site(3)}
    assert pooled_spacing(sites) == (1.0, 0.6, 1.0)  # halves: the smaller of the two medians
    # 4 + 2 of 10 cases: a's spacing along R, where b has the same; 4 + 4 of 10: d's along A and S
    fine, thick = (0.8, 0.8, 5.0), (0.8, 0.9, 6.0)
    sites = {"a": site(4, spacing=fine), "b": site(2, spacing=thick), "d": site(4, spacing=(1.2, 1.0, 3.0))}
    assert pooled_spacing(sites) == (0.8, 0.9, 5.0)


def test_no_site_sets_the_spacing_alone_however_many_cases_it_claims() -> None:
    honest = {name: site(4, spacing=(0.8, 0.8, mm)) for name, mm in (("a", 2.0), ("b", 3.0))}
    for claimed in (4, 10_000):
        for wild in ((0.1, 0.1, 0.1), (20.0, 20.0, 20.0)):
            found = pooled_spacing({**honest, "c": site(claimed, spacing=wild)})
            assert found[:2] == (0.8, 0.8)
            assert found[2] in (2.0, 3.0)


def test_the_window_shows_every_structure_however_small() -> None:
    sites = {"a": site(40, liver=(-16.0, 160.0), spleen=(0.0, 144.0)), "b": site(2, lung_left=(-992.0, -400.0))}
    assert pooled_window(sites) == (-992.0, 160.0)


def test_one_of_three_sites_that_know_a_structure_does_not_widen_the_window() -> None:
    sites = {name: site(liver=own) for name, own in (("a", (-16.0, 160.0)), ("b", (-32.0, 144.0)))}
    assert pooled_window({**sites, "c": site(liver=(-1024.0, 3072.0))}) == (-32.0, 160.0)
    assert pooled_window({**sites, "c": site(liver=(-1024.0, 160.0))}) == (-32.0, 160.0)


def test_modality_decides_the_intensity_rule_and_a_mixture_is_refused() -> None:
    ct, mr = site(), site(ct=0)
    assert pooled_intensity({"a": ct, "b": ct}) == "window"
    assert pooled_intensity({"a": mr, "b": mr}) == "zscore"
    with refused("mixed-modality") as caught:
        pooled_intensity({"a": ct, "b": site(4, ct=1)})
    assert "25% of b" in caught.value.why


def test_no_annotated_voxel_gives_no_window() -> None:
    with refused("no-window"):
        pooled_window({"a": site()})
