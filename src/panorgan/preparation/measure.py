"""Measures a case for the plan that is pooled over sites."""

from __future__ import annotations

from panorgan.data.case import Case
from panorgan.preparation.plan import Plan, PlanSettings
from panorgan.preparation.preprocess import Grid
from panorgan.preparation.site_statistics import CaseMeasurements, hu_histogram

# Fat is near -100 HU and in every CT; MR has next to nothing below zero.
_CT_BELOW_HU, _CT_SHARE = -50.0, 0.01


def measure_case(case: Case, settings: PlanSettings) -> CaseMeasurements:
    """Voxel size and extent of a case, cropped as the settings say, and the Hounsfield units inside its structures."""
    volume = case.read_image()
    is_ct = float((volume.voxels < _CT_BELOW_HU).mean()) > _CT_SHARE
    grid = Grid.of(volume, Plan(crop=settings.crop, intensity="window" if is_ct else "zscore"))
    x, y, z = (n * mm for n, mm in zip(grid.ras_shape, grid.ras_spacing, strict=True))
    counts = {}
    for name, mask in case.iter_masks(volume):  # read in any case: what is wrong with a label shows here
        if is_ct:
            counts[name] = hu_histogram(volume.voxels[mask])
    return CaseMeasurements(grid.ras_spacing, (x, y, z), is_ct, counts)
