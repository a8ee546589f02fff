"""What a site says about a model that it validates: two families of numbers, by structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DICE, VOLUME = "dice/", "volume/"
"""What their names begin with in a message."""


@dataclass(frozen=True)
class ValidationScores:
    """Of every structure that the site annotates.

    Attributes
    ----------
    dice : mean over the validation cases.
    volume : predicted / annotated volume, each summed over the validation cases: one case that lacks the structure
        does not make it infinite. Left out where no case shows it, or where the site's egress policy keeps it.
    """

    dice: Mapping[str, float]
    volume: Mapping[str, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """As a message carries them."""
        families = ((DICE, self.dice), (VOLUME, self.volume))
        return {f"{prefix}{name}": value for prefix, family in families for name, value in family.items()}

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, float]) -> ValidationScores:
        """The inverse of `numbers`; other numbers are passed over."""
        return cls(_family(numbers, DICE), _family(numbers, VOLUME))


def _family(numbers: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix)}
