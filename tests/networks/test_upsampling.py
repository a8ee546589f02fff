"""Linear interpolation as matrices: PyTorch's values, in the features' own precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from panorgan.networks import upsampling
from panorgan.networks.upsampling import upsample_channels


@pytest.fixture(autouse=True)
def _nothing_cached():
    upsampling._interpolation.cache_clear()
    yield
    upsampling._interpolation.cache_clear()


@pytest.mark.parametrize(("grid", "space"), [((3, 5), (6, 15)), ((2, 3, 4), (4, 9, 10))])
def test_values_are_those_of_interpolate(grid, space):
    features = torch.randn(2, 3, *grid)
    mode = "bilinear" if len(grid) == 2 else "trilinear"
    expected = F.interpolate(features, size=space, mode=mode, align_corners=False)
    torch.testing.assert_close(upsample_channels(features, space), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_precision_stays_where_interpolate_answers_in_float32(dtype, monkeypatch):
    """As under autocast on a GPU, which has `interpolate` in float32."""
    plain = F.interpolate
    monkeypatch.setattr(F, "interpolate", lambda values, **how: plain(values.float(), **how))
    features = torch.randn(1, 2, 3, 4).to(dtype)
    finer = upsample_channels(features, (6, 8))
    assert finer.dtype == dtype
    torch.testing.assert_close(finer.float(), upsample_channels(features.float(), (6, 8)), rtol=0.02, atol=0.02)
