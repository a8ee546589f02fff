"""A site's scores of a validated model: two families of numbers, by structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DICE, VOLUME = "dice/", "volume/"
"""Prefixes of their names in a message."""


@dataclass(frozen=True)
class ValidationScores:
    """Scores of every structure that the site annotates.

    Attributes
    ----------
    dice : mean over the validation cases.
    volume : predicted / annotated volume, each summed over the validation cases, so that one case without the structure
        does not make it infinite. Left out where no case shows it, or where the site's egress policy withholds it.
    """

    dice: Mapping[str, float]
    volume: Mapping[str, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """As a message carries them."""
        families = ((DICE, self.dice), (VOLUME, self.volume))
        return {f"{prefix}{name}": value for prefix, family in families for name, value in family.items()}

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, float]) -> ValidationScores:
        """The inverse of `numbers`; other numbers are ignored."""
        return cls(_family(numbers, DICE), _family(numbers, VOLUME))


def _family(numbers: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix)}
