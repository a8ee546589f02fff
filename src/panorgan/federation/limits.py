"""Limits for what a site may claim, agreed by the federation. Anything outside is refused by name."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field, field_validator

from panorgan.errors import MessageError
from panorgan.methods.protocol import SiteInfo
from panorgan.preparation.site_statistics import SiteStatistics
from panorgan.settings import SettingError, Settings

Range = tuple[float, float]


class LimitSettings(Settings):
    """The `limits` of an experiment, and of a federation between hospitals."""

    most_cases_per_site: int = Field(10_000, ge=1, description="a site that reports more training cases is refused")
    largest_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="no site counts for more than this share of a mean over three or more sites, whatever it reports; "
        "1 for no limit",
    )
    spacing_mm: Range = Field((0.1, 20.0), description="median voxel sizes that a site may have measured")
    extent_mm: Range = Field((1.0, 3000.0), description="median extents of scans that a site may have measured")
    hu: Range = Field((-1024.0, 3072.0), description="Hounsfield units that a site may have found in a structure")

    @field_validator("spacing_mm", "extent_mm", "hu")
    @classmethod
    def _ordered(cls, value: Range) -> Range:
        if not value[0] < value[1]:
            raise SettingError("give the minimum and the maximum, such as [0.1, 20]", code="range-not-ordered")
        return value


class HospitalLimits(LimitSettings):
    """The `limits` in `federation.yaml`: between hospitals, no site counts for more than all others together."""

    largest_share: float = Field(0.5, gt=0, le=1, description=LimitSettings.model_fields["largest_share"].description)


def check_counts(facts: SiteInfo, limits: LimitSettings) -> None:
    """Refuse a site that claims more cases than agreed: cases are weight in every mean."""
    if facts.train_cases > limits.most_cases_per_site:
        raise MessageError(
            f"Site {facts.name} claims more cases than agreed.",
            code="too-many-cases",
            why=f"{facts.train_cases:.6g}, limits.most_cases_per_site allows {limits.most_cases_per_site}",
            fix="If it really has so many, raise the limit for all sites.",
        )


def check_statistics(statistics: SiteStatistics, facts: SiteInfo, limits: LimitSettings) -> None:
    """Refuse measurements that are impossible for scans of patients, or that are of other cases than the site has."""
    site = facts.name
    if statistics.cases != facts.train_cases:
        raise MessageError(
            f"Site {site} measured other cases than it has.",
            code="measured-other-cases",
            why=f"{statistics.cases:.6g} cases measured, {facts.train_cases} to train with",
        )
    if foreign := sorted(statistics.hu_ranges.keys() - facts.annotated.keys()):
        raise MessageError(
            f"Site {site} measured what it does not annotate.", code="measured-unannotated", why=f"{foreign[0]!r:.100}"
        )
    _check_range(site, "spacing_mm", statistics.spacing_mm, limits.spacing_mm)
    _check_range(site, "extent_mm", statistics.extent_mm, limits.extent_mm)
    _check_range(site, "hu", (value for own in statistics.hu_ranges.values() for value in own), limits.hu)


def _check_range(site: str, name: str, values: Iterable[float], allowed: Range) -> None:
    low, high = allowed
    for value in values:
        if not low <= value <= high:
            raise MessageError(
                f"Site {site} reports a measurement that is impossible for scans of patients.",
                code="implausible-measurement",
                why=f"{value:.6g}, limits.{name} allows {low:g} to {high:g}",
                fix="Run 'panorgan doctor' on the site's data, or change the limit for all sites.",
            )
