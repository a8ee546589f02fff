"""Whatever bytes arrive, a reader gives a sound message or refuses it, and a round goes on without its sender."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Callable
from pathlib import Path

import fuzzing
import pytest
import torch
from federations import THREE, Meddling, make_coordinator, make_workers
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import Mutator
from refusing import refused

from panorgan.errors import MessageError, PanorganError
from panorgan.federation import collector as collector_module
from panorgan.federation.checks import read_scores
from panorgan.federation.collector import Collector, Request, Responses
from panorgan.federation.events import EventLog, read_events
from panorgan.federation.message import Message, MessageFile
from panorgan.federation.settings import Patience
from panorgan.methods.protocol import Payload

MANY = 100_000
"""Takes about ten seconds; `benchmarks/fuzz_messages.py` tries as many as one likes."""


def with_header(header: str, rest: bytes = b"") -> bytes:
    text = header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + rest


def with_head(head: str, entries: str = "", rest: bytes = b"") -> bytes:
    return with_header('{"__metadata__":' + json.dumps({"panorgan": head}) + entries + "}", rest)


def described(facts: str, rest: bytes = bytes(8)) -> bytes:
    return with_head('{"version": 1, "numbers": {}, "meta": {}}', f',"a":{facts}', rest)


def entry(shape: object, offsets: object, kind: object = "F32") -> str:
    return json.dumps({"dtype": kind, "shape": shape, "data_offsets": offsets})


DEEP = "[" * 100_000 + "]" * 100_000
HALF = '"dtype":"F32","shape":[1]'
HOSTILE: dict[str, bytes] = {
    "a deep header": with_header(DEEP),
    "a deep head": with_head(DEEP),
    "deep meta": with_head('{"version": 1, "numbers": {}, "meta": {"answers": ' + "[" * 600 + "]" * 600 + "}}"),
    "somewhat deep meta": with_head('{"version": 1, "numbers": {}, "meta": {"a": ' + "[" * 40 + "]" * 40 + "}}"),
    "a deep number": with_head('{"version": 1, "numbers": {"x": ' + DEEP + '}, "meta": {}}'),
    "a header of 2^63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "a header of 2^64 - 1 bytes": struct.pack("<Q", (1 << 64) - 1) + b"{}",
    "a header longer than all": struct.pack("<Q", 3) + b"{}",
    "UTF-16": struct.pack("<Q", 4) + "{}".encode("utf-16-le"),
    "not UTF-8": struct.pack("<Q", 4) + b'"\xff"}',
    "a head that is a list": with_head("[]"),
    "a head that is a number": with_head("7"),
    "NaN in meta": with_head('{"version": 1, "numbers": {}, "meta": {"a": NaN}}'),
    "infinity in meta": with_head('{"version": 1, "numbers": {}, "meta": {"a": -Infinity}}'),
    "1e999": with_head('{"version": 1, "numbers": {}, "meta": {"a": [1e999]}}'),
    "a number with 5000 digits": with_head('{"version": 1, "numbers": {}, "meta": {"a": ' + "1" * 5000 + "}}"),
    "a number beyond floats": with_head('{"version": 1, "numbers": {"x": 1' + "0" * 400 + '}, "meta": {}}'),
    "a text as a number": with_head('{"version": 1, "numbers": {"x": "1"}, "meta": {}}'),
    "true as a number": with_head('{"version": 1, "numbers": {"x": true}, "meta": {}}'),
    "a number twice": with_head('{"version": 1, "numbers": {"x": 1.0, "x": 2.0}, "meta": {}}'),
    "a version that is true": with_head('{"version": true, "numbers": {}, "meta": {}}'),
    "a version that is a list": with_head('{"version": [[1]], "numbers": {}, "meta": {}}'),
    "metadata that are no texts": with_header('{"__metadata__": {"panorgan": {"version": 1}}}'),
    "an escape in a name": with_head('{"version": 1, "numbers": {"\\u001b[2J": 1.0}, "meta": {}}'),
    "a line break in meta's name": with_head('{"version": 1, "numbers": {}, "meta": {"a\\n": 1}}'),
    "half a character": with_head('{"version": 1, "numbers": {"\\ud800": 1.0}, "meta": {}}'),
    "an escape in a key": with_head(
        '{"version": 1, "numbers": {}, "meta": {}}', ',"\\u0007":' + entry([2], [0, 8]), bytes(8)
    ),
    "no entry": described("7"),
    "negative offsets": described(entry([2], [-8, 0])),
    "offsets the wrong way": described(entry([2], [8, 0])),
    "offsets beyond the end": described(entry([2], [8, 16])),
    "one offset": described(entry([2], [8])),
    "offsets that are true": described(entry([1], [False, True], "U8"), bytes(1)),
    "a negative length": described(entry([-2], [0, 8])),
    "a length that is no whole number": described(entry([2.0], [0, 8])),
    "a shape that is too large": described(entry([1 << 62, 4], [0, 8])),
    "nothing of a size that is too large": described(entry([0, 1 << 62, 1 << 62], [0, 0]), b""),
    "an unknown type": described(entry([2], [0, 8], "F33")),
    "a type that is a list": described(entry([2], [0, 8], ["F32"])),
    "overlapping tensors": described(entry([2], [0, 8]) + ',"b":' + entry([1], [4, 8])),
    "a gap between tensors": described(entry([1], [0, 4]) + ',"b":' + entry([1], [8, 12]), bytes(12)),
    "a key twice": described("{" + HALF + ',"data_offsets":[0,4]},"a":{' + HALF + ',"data_offsets":[4,8]}'),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_message_is_refused_by_every_reader(what, tmp_path):
    content = HOSTILE[what]
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    for read in (Message.from_bytes, Message.outline, lambda _: MessageFile(path)):
        with refused("message-version" if "version" in what else "not-a-message", MessageError) as caught:
            read(content)
        assert len(str(caught.value)) < 1000


def test_100_000_mutated_messages_are_read_or_refused():
    mutator, taken = Mutator(fuzzing.SOUND, seed=17), 0
    for _ in range(MANY):
        taken += fuzzing.examine(mutator.message())
    assert MANY / 100 < taken < MANY / 2, "mutations that are all refused, or all accepted, test nothing"


def test_mutated_files_are_read_or_refused(tmp_path):
    mutator, taken = Mutator(fuzzing.SOUND, seed=18), 0
    for _ in range(2000):
        taken += fuzzing.examine_file(mutator.message(), tmp_path / "m.safetensors")
    assert taken


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {"version": st.just(1) | json_values, "numbers": json_values, "meta": json_values},
        optional={"more": json_values},
    )
    | json_values
)
def test_any_json_in_the_place_of_a_head_is_read_or_refused(head):
    fuzzing.examine(with_head(json.dumps(head)))


@pytest.mark.parametrize("name", ["a\n", "\x1b[2J", "\ud800", "\x9b"])
@pytest.mark.parametrize(
    "make", [lambda n: Message({n: torch.ones(1)}), lambda n: Message({}, {n: 1.0}), lambda n: Message({}, {}, {n: 1})]
)
def test_a_name_that_nobody_would_read_is_not_written(name, make):
    with refused("unsendable-name", MessageError):
        make(name).to_bytes()


# -- a round goes on -----------------------------------------------------------------------------------------------


class Answers:
    """A transport whose sites answer with whatever bytes they are given."""

    def __init__(self, answers: dict[str, bytes]) -> None:
        self.answers = answers
        self.sites = tuple(sorted(answers))

    def exchange(self, sites, make_request, on_reply, deadline=None):
        for site in sites:
            make_request(site)
            on_reply(site, self.answers[site])


def sound(site: str) -> bytes:
    return Message(fuzzing.WEIGHTS, {}, fuzzing.answer_meta(fuzzing.TRAIN, site)).to_bytes()


def collect(answers: dict[str, bytes], folder: Path) -> tuple[dict[str, MessageFile], Responses]:
    collector = Collector(Answers(answers), EventLog(folder / "events.jsonl"), Patience())
    request = Request(fuzzing.TRAIN, lambda site: Payload(), 1)
    return collector.collect(sorted(answers), request, lambda site: fuzzing.WEIGHTS, folder / "spool", None)


def refusals(folder: Path) -> dict[str, tuple[str, str]]:
    """Code and why, by site."""
    events = [event.facts for event in read_events(folder / "events.jsonl") if event.kind == "refused"]
    return {facts["site"]: (facts["code"], facts["why"]) for facts in events}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_answer_is_refused_by_name_and_the_round_goes_on(what, tmp_path):
    accepted, responses = collect({"east": sound("east"), "north": HOSTILE[what], "west": sound("west")}, tmp_path)
    assert accepted.keys() == {"east", "west"}
    assert responses.refused == {"north"}
    assert refusals(tmp_path).keys() == {"north"}
    assert {path.stem for path in (tmp_path / "spool").iterdir()} == {"east", "west"}


def test_mutated_answers_never_end_a_round(tmp_path):
    mutator = Mutator(fuzzing.SOUND, seed=19)
    for number in range(150):
        hostile = {site: mutator.message() for site in ("north", "south", "west")}
        folder = tmp_path / str(number)
        folder.mkdir()
        accepted, responses = collect({"east": sound("east"), **hostile}, folder)
        assert "east" in accepted
        for site in hostile:
            assert sum((site in accepted, site in responses.refused, site in responses.failed)) == 1


def test_mutated_scores_never_end_a_validation(tmp_path):
    mutator = Mutator(fuzzing.SOUND, seed=20)
    meta = fuzzing.answer_meta(fuzzing.SCORE, "east")
    east = Message(scalars={"dice/liver": 0.5}, meta=meta).to_bytes()
    for _ in range(300):
        scores = {}

        def read(site: str, answer: bytes, scores=scores) -> None:
            scores[site] = read_scores(answer, fuzzing.SCORE, site, fuzzing.VOCABULARY)

        collector = Collector(Answers({"east": east, "north": mutator.message()}), EventLog(), Patience())
        collector.ask(["east", "north"], Request(fuzzing.SCORE, lambda site: Payload(), 1), read)
        assert scores["east"].dice == {"liver": 0.5}


def test_a_run_goes_on_without_the_site_that_sends_deep_json(tiny, tmp_path):
    """A site that cannot introduce itself is not in, one whose update or scores are no message is out."""
    asked = []

    def meddle(site: str, kind: str, answer: bytes):
        asked.append((site, kind))
        hostile = site == "north" and kind != "join"
        return [(site, HOSTILE["a deep head"] if hostile else answer)]

    experiment = tiny(phantom=THREE, training={"rounds": 2, "validate_every": 1, "local_steps": 1})
    coordinator = make_coordinator(experiment, tmp_path, Meddling(make_workers(experiment, tmp_path), meddle))
    coordinator.run()
    assert coordinator.finished
    assert [kind for site, kind in asked if site == "north"] == ["join", "train", "evaluate", "train", "evaluate"]
    events = [event.facts for event in read_events(tmp_path / "events.jsonl") if event.kind == "refused"]
    assert [event["site"] for event in events] == ["north"] * 4


def test_an_error_that_nobody_foresaw_refuses_one_answer_and_names_its_type(tmp_path, monkeypatch):
    original = collector_module.check_answer

    def check(file, task, site, expected):
        return 1 / 0 if site == "north" else original(file, task, site, expected)

    monkeypatch.setattr(collector_module, "check_answer", check)
    accepted, responses = collect({"east": sound("east"), "north": sound("north")}, tmp_path)
    assert (accepted.keys(), responses.refused) == ({"east"}, {"north"})
    code, why = refusals(tmp_path)["north"]
    assert code == "unreadable-answer"
    assert why.startswith("ZeroDivisionError")
    assert not (tmp_path / "spool" / "north.safetensors").exists()


OWN_FAULTS = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EIO, "Input/output error"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("fault", OWN_FAULTS, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("place", ["write_atomically", "check_answer", "MessageFile"])
def test_no_site_is_blamed_for_a_fault_of_our_own(place, fault, tmp_path, monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise fault

    monkeypatch.setattr(collector_module, place, fail)
    with pytest.raises(type(fault)):
        collect({"east": sound("east"), "north": sound("north")}, tmp_path)
    assert not refusals(tmp_path)


def test_a_spooled_answer_that_cannot_be_opened_is_no_sites_fault(tmp_path, monkeypatch):
    """The message was sound when it came; a disk that fails afterwards is ours."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("panorgan.federation.message.safe_open", fail)
    with pytest.raises((OSError, MessageError)):
        collect({"east": sound("east")}, tmp_path)
    assert not refusals(tmp_path)
    assert (tmp_path / "spool" / "east.safetensors").exists()


def test_an_error_of_the_methods_own_is_no_sites_fault(tmp_path):
    collector = Collector(Answers({"east": sound("east")}), EventLog(tmp_path / "events.jsonl"), Patience())

    def expects(site: str) -> dict[str, torch.Tensor]:
        raise KeyError(site)

    request = Request(fuzzing.TRAIN, lambda site: Payload(), 1)
    with pytest.raises(KeyError):
        collector.collect(["east"], request, expects, tmp_path / "spool", None)
    assert not refusals(tmp_path)


# -- the way in at a site ------------------------------------------------------------------------------------------


def outcome(handle: Callable[[bytes], bytes], request: bytes) -> str:
    """What became of a request; an error that is none of ours ends the test."""
    try:
        return str(Message.from_bytes(handle(request)).meta["answers"])
    except PanorganError as error:
        return type(error).__name__


def test_a_worker_refuses_hostile_requests(tiny, tmp_path):
    """Requests of another experiment, so that none of them is worth training for."""
    worker = make_workers(tiny(), tmp_path)["north"]
    assert {outcome(worker.handle, request) for request in HOSTILE.values()} == {"MessageError"}
    mutator = Mutator(fuzzing.SOUND, seed=21)
    outcomes = {outcome(worker.handle, mutator.message()) for _ in range(3000)}
    assert outcomes == {"MessageError", "WrongExperimentError"}
