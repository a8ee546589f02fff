"""What a site's model forgets during local training: Dice on organs that its site owns, and on those it does not.

A site starts a round from the global model, which knows every organ, and trains on its own labels. Its model is scored
before it is averaged with the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from panorgan.anatomy import Vocabulary
from panorgan.evaluation.statistics import TEST_SPLIT, Row

GLOBAL_MODEL = "global"
"""Name of the averaged model; other models are named after their sites."""


@dataclass(frozen=True)
class ModelScores:
    """Mean Dice of one model: per organ, and over the organs that its site owns and does not own (NaN for none)."""

    organs: Mapping[str, float]
    on_owned: float
    on_others: float


@dataclass(frozen=True)
class Forgetting:
    """`local`: every site's model before it was averaged. `averaged`: the global model of the same round.

    The global model belongs to no site. Its two means are taken over the sites, each with its own organs, so that they
    compare with `on_owned` and `on_others`, the means over the local models.
    """

    local: Mapping[str, ModelScores]
    averaged: ModelScores | None

    @property
    def on_owned(self) -> float:
        """Local models on organs that their sites own."""
        return _mean(scores.on_owned for scores in self.local.values())

    @property
    def on_others(self) -> float:
        """Local models on organs that their sites do not own."""
        return _mean(scores.on_others for scores in self.local.values())


def forgetting(rows: Iterable[Row], owned: Mapping[str, Collection[str]], split: str = TEST_SPLIT) -> Forgetting:
    """Summarise the rows of a `local_models.csv`.

    Every organ counts the same, however many cases show it: a model's two means are those of its row in a table.

    Parameters
    ----------
    rows : with `model`, `split`, `organ` and `dice`.
    owned : site → the organs it labels, such as `covered_organs` gives them.
    split : which rows count.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["split"] == split:
            scores = found.setdefault(str(row["model"]), {})
            scores.setdefault(str(row["organ"]), []).append(float(row["dice"]))  # type: ignore[arg-type]
    means = {model: {o: _mean(v) for o, v in sorted(organs.items())} for model, organs in sorted(found.items())}
    local = {m: ModelScores(d, *_two_means(d, owned.get(m, ()))) for m, d in means.items() if m != GLOBAL_MODEL}
    if GLOBAL_MODEL not in means:
        return Forgetting(local, None)
    dice = means[GLOBAL_MODEL]
    pairs = [_two_means(dice, owned.get(site, ())) for site in local]
    return Forgetting(local, ModelScores(dice, _mean(p[0] for p in pairs), _mean(p[1] for p in pairs)))


def covered_organs(annotated: Iterable[str], vocabulary: Vocabulary) -> frozenset[str]:
    """The structures that a site labels, and for a union its parts.

    Not what lies inside unmarked: a liver mask contains its tumours, but does not show them.
    """
    structures = list(annotated)
    parts = {o for s in structures for o in vocabulary.members(s) if o not in vocabulary.inside(s)}
    return frozenset(parts.union(structures))


def _two_means(dice: Mapping[str, float], owned: Collection[str]) -> tuple[float, float]:
    """Mean over the organs that are owned, and over the others."""
    return (
        _mean(value for organ, value in dice.items() if organ in owned),
        _mean(value for organ, value in dice.items() if organ not in owned),
    )


def _mean(values: Iterable[float]) -> float:
    """NaN for no values; NaN values do not count."""
    known: Sequence[float] = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
