"""Deterministic train / validation / test splits by patient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from panorgan.cases.case import Case
from panorgan.cases.seeds import derive_seed
from panorgan.settings import Settings

Split = Literal["train", "validation", "test"]


class SplitSettings(Settings):
    """Shares of a site's patients. What is left after validation and test is for training."""

    validation: float = Field(0.15, ge=0, lt=1)
    test: float = Field(0.25, ge=0, lt=1)
    seed: int | None = Field(
        None, ge=0, description="of the split alone: set it to test the same patients whatever the experiment's seed is"
    )

    @model_validator(mode="after")
    def _leave_some_for_training(self) -> SplitSettings:
        if self.validation + self.test >= 1:
            raise ValueError("validation + test must stay below 1, so that something is left for training")
        return self


def split_cases(cases: Sequence[Case], settings: SplitSettings, seed: int) -> dict[Split, list[Case]]:
    """Share out a site's cases so that no patient is in two splits; independent of the order of `cases`.

    `seed` is the experiment's; `settings.seed` goes before it.

    Every split with a non-zero share gets at least one patient, as long as one is left for training.
    """
    seed = seed if settings.seed is None else settings.seed
    patients = sorted({case.patient for case in cases})
    site = "/".join(sorted({case.site for case in cases}))
    order = np.random.default_rng(derive_seed(seed, "split", site)).permutation(len(patients))

    def count(share: float, left: int) -> int:
        wanted = max(1, round(share * len(patients))) if share > 0 else 0
        return max(0, min(wanted, left - 1))

    # With three patients or more a large test share must not eat the only one that validation would get.
    kept = 1 if settings.validation > 0 and len(patients) > 2 else 0
    n_test = count(settings.test, len(patients) - kept)
    n_validation = count(settings.validation, len(patients) - n_test)
    named: dict[str, Split] = {}
    for rank, index in enumerate(order):
        split: Split = "train"
        if rank < n_test:
            split = "test"
        elif rank < n_test + n_validation:
            split = "validation"
        named[patients[index]] = split
    shared: dict[Split, list[Case]] = {"train": [], "validation": [], "test": []}
    for case in sorted(cases, key=lambda c: c.id):
        shared[named[case.patient]].append(case)
    return shared
