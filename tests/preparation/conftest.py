"""Small cases and stored cases for the tests of this room."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from panorgan.data.case import Case, LabelMap
from panorgan.preparation.plan import Plan
from panorgan.preparation.store import Store, StoredCase

Array = NDArray[Any]
WriteScan = Callable[..., Path]
MakeCase = Callable[..., Case]
StoreCase = Callable[..., StoredCase]

# With this plan and one-millimetre voxels nothing is resampled and HU / 500 is what the network sees.
AS_IT_IS = Plan(spacing_mm=(1.0, 1.0, 1.0), window_hu=(-500.0, 500.0))


@pytest.fixture
def make_case(write_scan: WriteScan) -> MakeCase:
    """make_case(id, hu, masks) → a case on disk; masks may overlap."""

    def make(id: str, hu: Array, masks: Mapping[str, Array], affine: Array | None = None) -> Case:
        image = write_scan(f"{id}_image.nii", hu.astype(np.float32), affine)
        if not masks:
            return Case(id, id, "north", image, ())
        # Every combination of structures that occurs gets its own integer; outside all is 0.
        codes = np.zeros(hu.shape, dtype=np.int64)
        for bit, mask in enumerate(masks.values()):
            codes |= np.asarray(mask, dtype=np.int64) << bit
        combinations = [0, *(int(code) for code in np.unique(codes) if code)]
        numbers = np.searchsorted(combinations, codes).astype(np.int16)
        labels = write_scan(f"{id}_label.nii", numbers, affine)
        ids = {
            name: tuple(i for i, code in enumerate(combinations) if code >> bit & 1) for bit, name in enumerate(masks)
        }
        declared = frozenset(range(len(combinations)))
        return Case(id, id, "north", image, tuple(masks), LabelMap(labels, ids, declared))

    return make


@pytest.fixture
def store_case(tmp_path: Path, make_case: MakeCase) -> StoreCase:
    """store_case(id, hu, masks) → the same, preprocessed without resampling."""
    store = Store(tmp_path / "store")

    def add(id: str, hu: Array, masks: Mapping[str, Array]) -> StoredCase:
        return store.add(make_case(id, hu, masks), AS_IT_IS)

    return add
