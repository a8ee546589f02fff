"""Deterministic train / validation / test splits by patient, which hold when patients are added.

A patient's place is a number in [0, 1): a hash of seed, site and patient. Test begins at 0, validation follows, the
rest trains. So a new patient finds a place and moves no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from panorgan.data.case import Case
from panorgan.errors import DataError
from panorgan.seeds import derive_seed
from panorgan.settings import SettingError, Settings

Split = Literal["train", "validation", "test"]

RULE = "patient-hash"
"""Written into manifests: a run that was split by another rule has other test cases."""


class SplitSettings(Settings):
    """Shares of a site's patients. What is left after validation and test is for training."""

    validation: float = Field(0.15, ge=0, lt=1)
    test: float = Field(0.25, ge=0, lt=1)
    seed: int | None = Field(
        None, ge=0, description="of the split alone: set it to test the same patients whatever the experiment's seed is"
    )
    balanced: bool = Field(
        False, description="exact shares, for data that stays as it is; a patient added later may move others"
    )

    @model_validator(mode="after")
    def _leave_some_for_training(self) -> SplitSettings:
        if self.validation + self.test >= 1:
            raise SettingError(
                "validation + test must stay below 1, so that something is left for training",
                code="no-share-for-training",
            )
        return self


def split_cases(cases: Sequence[Case], settings: SplitSettings, seed: int) -> dict[Split, list[Case]]:
    """Share out a site's cases so that no patient is in two splits; independent of the order of `cases`.

    `seed` is the experiment's; `settings.seed` goes before it.
    """
    seed = seed if settings.seed is None else settings.seed
    site = "/".join(sorted({case.site for case in cases}))
    places = {case.patient: _place(seed, site, case.patient) for case in cases}
    named = (_by_rank if settings.balanced else _by_place)(places, settings)
    if places and "train" not in named.values():
        raise DataError(
            f"The split leaves site {site} no patient to train on.",
            where="splits",
            why=f"the hashes of all {len(places)} patients fall into the test share, which happens at very small sites",
            fix="Choose another 'splits.seed', lower 'splits.test', add patients, or set 'splits.balanced: true'.",
            code="nobody-to-train-on",
        )
    shared: dict[Split, list[Case]] = {"train": [], "validation": [], "test": []}
    for case in sorted(cases, key=lambda c: c.id):
        shared[named[case.patient]].append(case)
    return shared


def _place(seed: int, site: str, patient: str) -> float:
    """A number in [0, 1) that depends on nothing else; 53 bits, because a float holds no more."""
    return (derive_seed(seed, "split", site, patient) >> 10) / 2**53


def _in_order(places: Mapping[str, float]) -> list[str]:
    return sorted(places, key=lambda patient: (places[patient], patient))


def _by_place(places: Mapping[str, float], settings: SplitSettings) -> dict[str, Split]:
    """By thresholds. A split that would be empty takes the patient nearest to it, if one is left to train.

    A patient that is tested here was tested in every smaller site of two or more: an addition may send the patient that
    filled an empty test split back to training, and never the other way. That is why no patient of the test share is
    lent to validation or training, however few there are.
    """
    order = _in_order(places)
    if len(order) < 2:
        return dict.fromkeys(order, "train")
    test = [patient for patient in order if places[patient] < settings.test] or order[: settings.test > 0]
    others = order[len(test) :]
    border = settings.test + settings.validation
    validation = [patient for patient in others if places[patient] < border] or others[: settings.validation > 0]
    if len(validation) == len(others):
        validation = validation[:-1]
    return _named(order, len(test), len(validation))


def _by_rank(places: Mapping[str, float], settings: SplitSettings) -> dict[str, Split]:
    """Exact shares. Every split with a share gets at least one patient, as long as one is left for training.

    One addition moves borders by one patient at most, so that no patient goes from training straight to test.
    """
    count = len(places)

    def size(share: float, left: int) -> int:
        wanted = max(1, round(share * count)) if share > 0 else 0
        return max(0, min(wanted, left - 1))

    # With three patients or more a large test share must not eat the only one that validation would get.
    kept = 1 if settings.validation > 0 and count > 2 else 0
    test = size(settings.test, count - kept)
    return _named(_in_order(places), test, size(settings.validation, count - test))


def _named(order: Sequence[str], test: int, validation: int) -> dict[str, Split]:
    """The first patients test, the next validate, the rest trains."""
    named: dict[str, Split] = dict.fromkeys(order, "train")
    named.update(dict.fromkeys(order[:test], "test"))
    named.update(dict.fromkeys(order[test : test + validation], "validation"))
    return named
