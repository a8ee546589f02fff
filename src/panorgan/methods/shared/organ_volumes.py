"""Organs from large to small, by volumes that sites measure on their own labels: the overlap priority of pseudo labels.

With its teacher, a site sends the mean volume of each structure that it annotates, in millilitres and with two digits;
the server sends the means over sites to all sites. So if two teachers claim a voxel, the smaller organ wins at every
site, without a configured order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from panorgan.anatomy import Vocabulary
from panorgan.methods.protocol import Federation, Scalars, Updates
from panorgan.preparation.store import StoredCase

PREFIX = "volume_ml/"
VOLUMES = {f"{PREFIX}*": "mean volume of each structure that the site annotates, in ml and rounded, sent once"}
"""Numbers that leave a site, for `Method.numbers`."""


def measure_volumes(cases: Iterable[StoredCase]) -> dict[str, float]:
    """Numbers for the server: per annotated structure the mean volume over the cases that show it."""
    found: dict[str, list[float]] = {}
    for case in cases:
        voxel_ml = math.prod(case.spacing) / 1000
        for structure, mask in case.masks():
            if voxels := int(mask.sum()):
                found.setdefault(structure, []).append(voxels * voxel_ml)
    return {f"{PREFIX}{name}": float(f"{sum(own) / len(own):.2g}") for name, own in sorted(found.items())}


class ServerVolumes:
    """The volumes that sites have measured."""

    def __init__(self) -> None:
        self._of: dict[str, float] = {}
        """By `<site>/<structure>`."""

    def collect(self, updates: Updates, federation: Federation) -> None:
        """Take the volumes from updates; numbers that are no volume of an annotated structure are ignored."""
        for site in updates.sites:
            own = federation.sites[site].annotated
            for name, value in updates.scalars(site).items():
                structure = name.removeprefix(PREFIX)
                if name.startswith(PREFIX) and structure in own and math.isfinite(value) and value > 0:
                    self._of[f"{site}/{structure}"] = value

    def pooled(self, federation: Federation) -> dict[str, float]:
        """Numbers for sites: per organ the mean over sites; parts of a union share its volume if no site names them."""
        by_name: dict[str, list[float]] = {}
        by_union: dict[str, list[float]] = {}
        whole = federation.vocabulary
        for key, volume in sorted(self._of.items()):
            structure = key.partition("/")[2]
            parts = [organ for organ in whole.members(structure) if organ not in whole.inside(structure)]
            for organ in parts:
                (by_name if organ == structure else by_union).setdefault(organ, []).append(volume / len(parts))
        pooled = {organ: sum(found) / len(found) for organ, found in {**by_union, **by_name}.items()}
        return {f"{PREFIX}{organ}": pooled[organ] for organ in whole if organ in pooled}

    def numbers(self) -> dict[str, float]:
        """The numbers that the coordinator must keep."""
        return {f"{PREFIX}{key}": value for key, value in self._of.items()}

    def load(self, numbers: Scalars) -> None:
        """Restore what `numbers` returned."""
        self._of = {name.removeprefix(PREFIX): value for name, value in numbers.items() if name.startswith(PREFIX)}


def larger_first(given: Sequence[str], numbers: Scalars, vocabulary: Vocabulary) -> tuple[str, ...]:
    """Organs from large to small, for `overlap_priority`: the given ones first, then all others of known volume."""
    volumes = {organ: numbers[f"{PREFIX}{organ}"] for organ in vocabulary if f"{PREFIX}{organ}" in numbers}
    others = (organ for organ in volumes if organ not in given)
    return (*given, *sorted(others, key=lambda organ: -volumes[organ]))
