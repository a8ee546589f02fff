"""Who takes part: a site's introduction is checked like everything else it sends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from federations import make_coordinator, make_workers

from panorgan.errors import RunError
from panorgan.federation.events import Event
from panorgan.federation.message import Message
from panorgan.federation.transports.local import LocalTransport

NORTH_KNOWS_ALL = {
    "sites": [
        {
            "name": "north",
            "annotated": ["liver", "spleen", "kidney_left", "kidney_right"],
            "cases": 3,
            "spacing_mm": [14, 14, 14],
        },
        {"name": "south", "annotated": ["liver"], "cases": 3, "spacing_mm": [14, 14, 14]},
    ]
}


class Joining(LocalTransport):
    """Replaces the answer of site south to the question who it is."""

    def __init__(self, workers, answer: Callable[[Message], bytes] | None) -> None:
        super().__init__(workers)
        self.answer = answer

    def exchange(self, sites, make_request, on_reply, deadline=None):
        def changed(site: str, answer: bytes) -> None:
            message = Message.from_bytes(answer)
            if site == "south" and message.meta["answers"].startswith("join"):
                if self.answer is None:
                    return  # silent
                answer = self.answer(message)
            on_reply(site, answer)

        super().exchange(sites, make_request, changed)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda message: b"garbage", "not a message"),
        (lambda message: Message({}, {}, message.meta).to_bytes(), "does not say who it is"),
        (lambda message: Message({}, message.numbers, {**message.meta, "run": "x"}).to_bytes(), "does not belong"),
    ],
    ids=["garbage", "no counts", "another run"],
)
def test_a_bad_introduction_is_refused_by_name(tiny, tmp_path, answer, reason):
    experiment = tiny(phantom=NORTH_KNOWS_ALL)
    heard: list[Event] = []
    coordinator = make_coordinator(experiment, tmp_path, Joining(make_workers(experiment, tmp_path), answer), heard)
    assert set(coordinator.federation.sites) == {"north"}
    (refused,) = [event.facts for event in heard if event.kind == "refused"]
    assert refused["site"] == "south"
    assert reason in refused["reason"]


def test_too_few_sites_at_the_start(tiny, tmp_path):
    """Told before anybody trains, not after a round."""
    experiment = tiny(phantom=NORTH_KNOWS_ALL, training={"min_sites": 2})
    with pytest.raises(RunError, match="Only 1 site joined, 2 are needed") as caught:
        make_coordinator(experiment, tmp_path, Joining(make_workers(experiment, tmp_path), None))
    assert caught.value.fix
    assert not (tmp_path / "checkpoints").exists()
