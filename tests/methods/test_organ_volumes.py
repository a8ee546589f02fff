"""Organs from large to small: what sites measure, how it is pooled, and that labels are painted in that order."""

from __future__ import annotations

import numpy as np
import pytest
from overhearing import overheard

from panorgan.anatomy import Vocabulary
from panorgan.losses.unified_label import overlap_priority
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.methods.shared.organ_volumes import ServerVolumes, larger_first, measure_volumes
from panorgan.preparation.store import StoredCase

FACTS = {
    "a": SiteInfo("a", 2, {"spleen": 2, "kidney": 1}),
    "b": SiteInfo("b", 1, {"spleen": 1, "kidney_left": 1}),
}
FEDERATION = Federation(Vocabulary(["spleen", "kidney_left", "kidney_right", "pancreas"]), FACTS)


class Answers:
    """Updates with numbers alone."""

    def __init__(self, **numbers: dict[str, float]) -> None:
        self.sites, self._numbers = sorted(numbers), numbers

    def scalars(self, site: str) -> dict[str, float]:
        return self._numbers[site]


def stored(folder, name: str, structures: tuple[str, ...], counts: tuple[int, ...]) -> StoredCase:
    """A case of voxels of 10 × 10 × 5 mm, half a millilitre, with so many of them in each structure."""
    place = folder / name
    place.mkdir()
    bits = np.zeros(100, dtype=np.uint8)
    for bit, count in enumerate(counts):
        bits[:count] |= 1 << bit
    np.save(place / "labels.npy", bits.reshape(10, 10, 1))
    (place / "case.json").write_text('{"spacing_mm": [10, 10, 5]}')
    return StoredCase(name, name, "a", structures, place)


def test_a_site_measures_what_it_annotates(tmp_path):
    """Spleen: (20 + 45)/2 voxels = 16.25 ml, sent as 16. An empty mask is no volume; nor is what no case shows."""
    cases = [
        stored(tmp_path, "x", ("spleen", "kidney"), (20, 0)),
        stored(tmp_path, "y", ("spleen", "kidney"), (45, 7)),
        stored(tmp_path, "z", ("pancreas",), (0,)),
    ]
    assert measure_volumes(cases) == {"volume_ml/spleen": 16.0, "volume_ml/kidney": 3.5}


def test_volumes_are_pooled_over_sites():
    """Spleen (16 + 30)/2. The left kidney is known by name, the right one has half of a kidney."""
    volumes = ServerVolumes()
    volumes.collect(
        Answers(
            a={"volume_ml/spleen": 16.0, "volume_ml/kidney": 40.0, "cases": 2.0},
            b={"volume_ml/spleen": 30.0, "volume_ml/kidney_left": 25.0},
        ),
        FEDERATION,
    )
    pooled = {"volume_ml/spleen": 23.0, "volume_ml/kidney_left": 25.0, "volume_ml/kidney_right": 20.0}
    assert volumes.pooled(FEDERATION) == pooled
    again = ServerVolumes()
    again.load({**volumes.numbers(), "teacher/a": 1.0})
    assert again.pooled(FEDERATION) == pooled


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_what_cannot_be_a_volume_is_left_alone(value):
    volumes = ServerVolumes()
    volumes.collect(Answers(a={"volume_ml/spleen": value, "volume_ml/pancreas": 9.0, "volume_ml/x": 1.0}), FEDERATION)
    assert volumes.pooled(FEDERATION) == {}, "the pancreas is none of its structures"


def test_larger_organs_come_first_and_those_given_before_them():
    numbers = {"volume_ml/spleen": 23.0, "volume_ml/kidney_left": 25.0, "teacher/a": 1.0}
    vocabulary = FEDERATION.vocabulary
    assert larger_first((), numbers, vocabulary) == ("kidney_left", "spleen")
    assert larger_first(("spleen",), numbers, vocabulary) == ("spleen", "kidney_left")
    order = overlap_priority(vocabulary, larger_first((), numbers, vocabulary))
    assert order == ("kidney_left", "spleen", "kidney_right", "pancreas"), "of unknown volume: on top"
    assert larger_first((), {}, vocabulary) == ()


def test_sites_paint_in_the_order_of_measured_volumes(tiny, tmp_path):
    """A vocabulary from small to large; volumes turn it round, at every site alike."""
    organs = ["kidney_right", "kidney_left", "spleen", "liver"]
    experiment = tiny(
        vocabulary=organs,
        method={"name": "fedavg_pl", "pretrain": 0.3},
        training={"rounds": 1, "validate_every": 0, "local_steps": 1},
    )
    coordinator, sites = overheard(experiment, tmp_path)
    coordinator.run()
    reported = {n: v for site in sites.values() for n, v in site.sent[0].scalars.items() if n.startswith("volume_ml/")}
    assert set(reported) == {"volume_ml/liver", "volume_ml/spleen", "volume_ml/kidney"}
    assert reported["volume_ml/liver"] > reported["volume_ml/spleen"]
    assert all(not n.startswith("volume_ml/") for s in sites.values() for m in s.sent[1:] for n in m.scalars), "once"
    pooled = coordinator.rule.volumes.pooled(coordinator.federation)
    by_volume = tuple(sorted(organs, key=lambda organ: -pooled[f"volume_ml/{organ}"]))
    assert by_volume[0] == "liver"
    assert {site.worker._rule.order for site in sites.values()} == {by_volume}
