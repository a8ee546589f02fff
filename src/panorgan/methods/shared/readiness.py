"""The organs that the global model knows well enough to be a teacher; UFPS's GMT and chorus's Dice wait for each.

The server decides by scores that sites send anyway: the validation Dice of the global model, from sites that annotate
the organ. An organ is *known* while its Dice, the mean over these sites, is at least `least`. It has *settled* once it
was known and a validation gained at most `gain` over the best before: training has converged on it. A teacher that does
not know an organ would erase it at every site that does not label it.
"""

from __future__ import annotations

from collections.abc import Mapping

from panorgan.methods.protocol import Federation, Scalars
from panorgan.methods.shared.prefixed import under

READY = "main_teacher/"
"""Numbers in a request: `main_teacher/<organ>` for every organ for which the global model is ready."""
_DICE, _BEST, _SETTLED = "main_teacher_dice/", "main_teacher_best/", "main_teacher_settled/"


class Readiness:
    """Scores of the global model, organ by organ.

    Parameters
    ----------
    least, gain : see above. With `least` = 0 no scores are needed: all organs are ready.
    """

    def __init__(self, least: float = 0.5, gain: float = 0.02) -> None:
        self.least, self.gain = least, gain
        self._dice: dict[str, float] = {}
        """By `<site>/<structure>`: a site that does not answer counts with its last score."""
        self._best: dict[str, float] = {}
        self._settled: set[str] = set()

    def validated(self, scores: Mapping[str, Mapping[str, float]], federation: Federation) -> None:
        """Take the sites' validation Dice by structure."""
        for site in scores.keys() & federation.sites.keys():
            own = federation.sites[site].annotated
            self._dice |= {f"{site}/{name}": dice for name, dice in scores[site].items() if name in own}
        for organ, dice in self.dice(federation).items():
            if dice >= self.least and dice - self._best.get(organ, 0.0) <= self.gain:
                self._settled.add(organ)
            self._best[organ] = max(dice, self._best.get(organ, 0.0))

    def dice(self, federation: Federation) -> dict[str, float]:
        """The latest score of every organ that some site scored: the mean over its sites.

        Parts of a union (`kidney`) have its Dice where no site scores them by name.
        """
        by_name: dict[str, list[float]] = {}
        by_union: dict[str, list[float]] = {}
        whole = federation.vocabulary
        for key, dice in sorted(self._dice.items()):
            site, _, structure = key.partition("/")
            if site not in federation.sites:
                continue
            for organ in whole.members(structure):
                if organ not in whole.inside(structure):
                    (by_name if organ == structure else by_union).setdefault(organ, []).append(dice)
        return {organ: sum(found) / len(found) for organ, found in {**by_union, **by_name}.items()}

    def ready(self, federation: Federation) -> tuple[str, ...]:
        """The organs for which the global model is ready, in vocabulary order."""
        taught = federation.labelled_organs()
        if self.least == 0:
            return taught
        dice = self.dice(federation)
        return tuple(o for o in taught if o in self._settled and dice.get(o, 0.0) >= self.least)

    def numbers(self) -> dict[str, float]:
        """The numbers that the coordinator must keep."""
        dice = {f"{_DICE}{key}": value for key, value in self._dice.items()}
        best = {f"{_BEST}{organ}": value for organ, value in self._best.items()}
        return {**dice, **best, **{f"{_SETTLED}{organ}": 1.0 for organ in sorted(self._settled)}}

    def load(self, numbers: Scalars) -> None:
        """Restore what `numbers` returned; other numbers of a rule's state are ignored."""
        self._dice = under(_DICE, numbers)
        self._best = under(_BEST, numbers)
        self._settled = set(under(_SETTLED, numbers))
