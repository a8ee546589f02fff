"""Every federated method, by being registered: late joiners, silent sites, unions, overlapping labels, resumed bits.

What else holds for every method: test_every_method (what leaves a site), test_methods (it learns),
tests/workflows/test_channels_run (slices, channels), tests/e2e/test_parity (the network gives the same bits).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from federations import Tampering, make_coordinator, make_workers, same
from fediod_pieces import SMALL as NARROW

from panorgan.config import Experiment
from panorgan.federation.coordinator import Coordinator
from panorgan.federation.events import read_events
from panorgan.methods.registry import methods

FEDERATED = [name for name, method in methods().items() if not method.pooled]
SITES = [
    {"name": "north", "annotated": ["liver"], "cases": 4, "spacing_mm": [14, 14, 14]},
    {"name": "south", "annotated": ["spleen", "kidney"], "cases": 4, "spacing_mm": [14, 14, 14]},  # a union
    {"name": "west", "annotated": ["liver", "kidney_left"], "cases": 4, "spacing_mm": [14, 14, 14]},  # overlaps both
]
TRAINING = {"rounds": 4, "validate_every": 2, "local_steps": 1, "optimizer": {"keep_state": True}}


def trained(experiment: Experiment, folder: Path, restarts: bool) -> Coordinator:
    """A run that west joins in the third round from the end, and in which north is silent in the last but one.

    With `restarts` all processes end after every round, and go on from what is on disk.
    """
    rounds = sum(stage.rounds for stage in experiment.build_method().stages(experiment.training.rounds))
    coordinator = None
    for number in range(1, rounds + 1):
        if coordinator is None or restarts:
            transport = Tampering(make_workers(experiment, folder))
            coordinator = make_coordinator(experiment, folder, transport, joins_at={"west": rounds - 2})
        transport.drop = ("north",) if number == rounds - 1 else ()
        coordinator.run(rounds=1)
    assert coordinator is not None
    return coordinator


@pytest.mark.slow
@pytest.mark.parametrize("name", FEDERATED)
def test_it_survives_a_late_joiner_a_silent_site_and_restarts(
    name: str, tiny: Callable[..., Experiment], tmp_path: Path
) -> None:
    phantom = {"field_of_view_mm": [364, 320, 220], "sites": SITES}
    narrow = NARROW if name == "fediod" else {}
    network = (
        {} if name == "fediod" else {"features": [4, 8]}
    )  # its attention grows with the width of the deepest level
    experiment = tiny(method={"name": name, **narrow}, training=TRAINING, phantom=phantom, network=network)
    through, resumed = (trained(experiment, tmp_path / str(restarts), restarts) for restarts in (False, True))
    assert same(dict(through.state.weights), dict(resumed.state.weights))
    assert same(dict(through.delivered_weights()[1]), dict(resumed.delivered_weights()[1]))
    for folder in ("False", "True"):
        answered = [set(e.facts["sites"]) for e in read_events(tmp_path / folder / "events.jsonl") if e.kind == "round"]
        assert answered[-4:] == [
            {"north", "south"},
            {"north", "south", "west"},
            {"south", "west"},
            {"north", "south", "west"},
        ]
