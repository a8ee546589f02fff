"""Reports organs that a federation is losing: not found by the sites that annotate them, or predicted far too large.

Averaging can lose an organ without a fault at any site, and a mean over organs hides it. Sites score the model on what
they annotate, by its Dice and its predicted volume; that is enough to notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from panorgan.federation.remedies import Remedies
from panorgan.methods.protocol import Notice

LOST = 0.05
"""A validation Dice below this means that the organ is not found."""
FLOODS = 3.0
"""Predicted volume / annotated volume above this means that the organ takes over its surroundings."""
FIRST_LOOK = 0.25
"""Share of a stage's rounds after which an organ should have appeared."""
IN_A_ROW = 2
"""Consecutive validations that must agree: a single one may be chance."""

ORGAN_LOST, ORGAN_FLOODS = "organ-lost", "organ-floods"
"""Codes of the notices."""

SiteScores = Mapping[str, Mapping[str, float]]
"""Site → organ → number."""


class Watchdog:
    """Keeps the results of validations by organ; `remedies` are settings that the experiment could use."""

    def __init__(self, remedies: Remedies | None = None) -> None:
        self._remedies = remedies or Remedies()
        self._lost: dict[str, int] = {}
        self._floods: dict[str, int] = {}

    def look(self, progress: float, dice: SiteScores, volume: SiteScores) -> list[Notice]:
        """Organs in trouble after a validation at `progress` in [0, 1] of a stage.

        `volume` is predicted / annotated volume; sites may leave it out.
        """
        best, smallest = _over_sites(dice, max), _over_sites(volume, min)
        known = any(value >= LOST for value in best.values())
        lost = [organ for organ, value in best.items() if value < LOST and known and progress >= FIRST_LOOK]
        floods = [organ for organ, value in smallest.items() if value > FLOODS and progress >= FIRST_LOOK]
        return [
            *(_lost(o, _owners(dice, o), self._remedies.lost) for o in _persistent(self._lost, lost)),
            *(_floods(o, _owners(volume, o), self._remedies.floods) for o in _persistent(self._floods, floods)),
        ]


def _lost(organ: str, owners: str, settings: Sequence[str]) -> Notice:
    return Notice(
        ORGAN_LOST,
        f"{organ} is not found (validation Dice below {LOST} at {owners}, {IN_A_ROW} times in a row), while other "
        f"organs are. Check its labels with 'panorgan doctor'.{_set(settings)} Raise training.sampling.foreground, "
        "give it more rounds, or lower the learning rate.",
    )


def _floods(organ: str, owners: str, settings: Sequence[str]) -> Notice:
    return Notice(
        ORGAN_FLOODS,
        f"{organ} takes over its surroundings (predicted more than {FLOODS:g} times as large as annotated at {owners}, "
        f"{IN_A_ROW} times in a row).{_set(settings)} Lower the learning rate, or choose a method that distils "
        "unlabelled organs (flkd).",
    )


def _set(settings: Sequence[str]) -> str:
    return f" Set {', '.join(settings)}." if settings else ""


def _over_sites(numbers: SiteScores, choose: Callable[[list[float]], float]) -> dict[str, float]:
    organs: dict[str, list[float]] = {}
    for site in numbers.values():
        for organ, value in site.items():
            organs.setdefault(organ, []).append(value)
    return {organ: choose(values) for organ, values in sorted(organs.items())}


def _persistent(counts: dict[str, int], now: list[str]) -> list[str]:
    """Organs for which this has held `IN_A_ROW` times; updates `counts`."""
    for organ in [*counts]:
        if organ not in now:
            del counts[organ]
    for organ in now:
        counts[organ] = counts.get(organ, 0) + 1
    return [organ for organ in now if counts[organ] == IN_A_ROW]


def _owners(numbers: SiteScores, organ: str) -> str:
    return ", ".join(sorted(site for site, values in numbers.items() if organ in values))
