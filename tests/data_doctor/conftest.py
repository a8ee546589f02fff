"""A clean folder of coarse phantoms for all tests of the doctor, and copies of it to damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from faults import Bench, write_clean_folder


@pytest.fixture(scope="session")
def clean_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine cases, eight organs; no test may change it."""
    return write_clean_folder(tmp_path_factory.mktemp("clean") / "phantoms")


@pytest.fixture
def make_bench(clean_folder: Path, tmp_path: Path) -> Callable[..., Bench]:
    """make_bench(seed, cases) → a copy of the clean folder."""
    return lambda seed=0, cases=4, name="data": Bench(clean_folder, tmp_path / name, seed, cases)
