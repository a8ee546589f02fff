"""Messages: the same content gives the same bytes, and bytes that are not ours are refused."""

from __future__ import annotations

import json
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused
from safetensors.torch import load, save

from panorgan.errors import MessageError
from panorgan.federation.message import Message, MessageFile

names = st.text(
    st.characters(codec="ascii", exclude_characters="\x00", categories=("L", "N", "P")), min_size=1, max_size=12
)
dtypes = st.sampled_from(
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
)


@st.composite
def any_tensor(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31)))) * 10
    return values.to(draw(dtypes))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(names.filter(lambda n: n != "__metadata__"), any_tensor(), max_size=4),
    st.dictionaries(names, st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False), max_size=4),
    st.dictionaries(names, st.one_of(st.integers(-(2**53), 2**53), st.text(max_size=5), st.none()), max_size=3),
)
def test_round_trip_is_exact(tensors, numbers, meta):
    message = Message(tensors, numbers, meta)
    back = Message.from_bytes(message.to_bytes())
    assert dict(back.scalars) == numbers
    assert dict(back.meta) == meta
    assert set(back.tensors) == set(tensors)
    for key, value in tensors.items():
        assert back.tensors[key].dtype == value.dtype
        assert back.tensors[key].shape == value.shape
        assert torch.equal(back.tensors[key], value)


def test_equal_messages_give_equal_bytes_whatever_the_order():
    a, b = torch.ones(2), torch.zeros(3)
    one = Message({"a": a, "b": b}, {"x": 1.0, "y": 2.0}).to_bytes()
    other = Message({"b": b, "a": a}, {"y": 2.0, "x": 1.0}).to_bytes()
    assert one == other


def test_a_view_travels_as_what_it_shows():
    matrix = torch.arange(6.0).reshape(2, 3)
    back = Message.from_bytes(Message({"t": matrix.T}).to_bytes())
    assert torch.equal(back.tensors["t"], matrix.T)


def test_tensors_that_share_memory_travel_under_both_names():
    """A server that sends a teacher which is also the global model, say."""
    whole = torch.arange(6.0)
    back = Message.from_bytes(Message({"a": whole, "b": whole, "half": whole[:3]}).to_bytes())
    assert torch.equal(back.tensors["a"], whole)
    assert torch.equal(back.tensors["b"], whole)
    assert torch.equal(back.tensors["half"], whole[:3])


def test_what_is_read_is_the_readers_own():
    content = Message({"w": torch.ones(2)}).to_bytes()
    Message.from_bytes(content).tensors["w"].zero_()
    assert Message.from_bytes(content).tensors["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_not_sent(value):
    with refused("not-finite", MessageError) as caught:
        Message(scalars={"loss": value}).to_bytes()
    assert f"loss = {value}" in caught.value.what


def test_another_version_is_refused_with_the_fix():
    head = json.dumps({"version": 99, "numbers": {}, "meta": {}})
    content = save({"w": torch.ones(1)}, metadata={"panorgan": head})
    with refused("message-version", MessageError) as caught:
        Message.from_bytes(content)
    assert "99" in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"\xff" * 64,
        save({"w": torch.ones(1)}),
        save({"w": torch.ones(1)}, metadata={"panorgan": "{"}),
        save({"w": torch.ones(1)}, metadata={"panorgan": json.dumps({"version": 1, "numbers": [], "meta": {}})}),
        save({"w": torch.ones(1)}, metadata={"panorgan": '{"version": 1, "numbers": {"x": NaN}, "meta": {}}'}),
        save({"w": torch.ones(1)}, metadata={"panorgan": json.dumps({"version": 1, "numbers": {}, "meta": 3})}),
        save(
            {"w": torch.ones(1)},
            metadata={"panorgan": f'{{"version": 1, "numbers": {{"x": 1{"0" * 400}}}, "meta": {{}}}}'},
        ),
    ],
    ids=[
        "empty",
        "short",
        "absurd length",
        "foreign",
        "broken json",
        "numbers list",
        "nan",
        "meta number",
        "huge integer",
    ],
)
def test_bytes_that_are_not_a_message_are_refused(content, tmp_path):
    with refused("not-a-message", MessageError):
        Message.from_bytes(content)
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with refused("not-a-message", MessageError):
        MessageFile(path)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_bytes_never_do_worse_than_a_message_error(data):
    """Cut or flip anywhere: either a clean refusal or (a flip inside a tensor) a well-formed message."""
    content = bytearray(Message({"w": torch.arange(8.0)}, {"x": 1.0}, {"task": "train"}).to_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    damaged = content[:position] if data.draw(st.booleans()) else content
    if len(damaged) > position:
        damaged[position] ^= data.draw(st.integers(1, 255))
    try:
        read = Message.from_bytes(bytes(damaged))
    except MessageError:
        return  # any other exception fails the test
    assert isinstance(read, Message)


def test_a_file_reads_one_tensor_at_a_time(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(Message({"a": torch.ones(2, 3), "b": torch.zeros(1)}, {"n": 3.0}, {"site": "north"}).to_bytes())
    file = MessageFile(path)
    assert set(file.keys) == {"a", "b"}
    assert file.shape("a") == (2, 3)
    assert torch.equal(file.tensor("a"), torch.ones(2, 3))
    assert file.scalars == {"n": 3.0}
    assert file.message().meta == {"site": "north"}


# -- the bytes themselves ---------------------------------------------------------------------------------------

MIXED = {
    "bits": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "half": torch.tensor([0.5, -2.0], dtype=torch.float16),
    "double": torch.tensor([[1.0, 2.0]], dtype=torch.float64),
    "mask": torch.tensor([True, False, True]),
    "weight": torch.arange(6.0).reshape(2, 3),
}


def test_safetensors_reads_what_we_write():
    content = Message(MIXED, {"x": 1.0}, {"site": "north"}).to_bytes()
    read = load(content)
    assert read.keys() == MIXED.keys()
    assert all(torch.equal(read[key], MIXED[key]) and read[key].dtype == MIXED[key].dtype for key in MIXED)


def test_every_tensor_begins_at_a_multiple_of_its_width():
    content = Message(MIXED).to_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    begins = {key: 8 + length + header[key]["data_offsets"][0] for key in MIXED}
    assert all(begins[key] % MIXED[key].element_size() == 0 for key in MIXED)


def test_the_pieces_make_up_the_bytes():
    message = Message(MIXED, {"x": 1.0})
    assert b"".join(message.to_pieces()) == message.to_bytes()
    assert len(message.to_pieces()) == 1 + len(MIXED)


@pytest.mark.parametrize("tensors", [{"w": torch.ones(2, dtype=torch.complex64)}, {"__metadata__": torch.ones(2)}])
def test_what_the_format_does_not_know_is_not_sent(tensors):
    with refused("unsendable-tensor", MessageError):
        Message(tensors).to_bytes()


def test_an_outline_has_everything_but_values():
    message = Message(MIXED, {"x": 1.0}, {"site": "north"})
    outline = Message.outline(message.to_bytes())
    assert (outline.scalars, outline.meta) == (message.scalars, message.meta)
    assert {k: (v.shape, v.dtype) for k, v in outline.tensors.items()} == {
        k: (v.shape, v.dtype) for k, v in MIXED.items()
    }
    assert all(value.device.type == "meta" for value in outline.tensors.values())
    assert outline.is_all_of(message.to_bytes())


def _with_header(content: bytes, change) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    text = change(content[8 : 8 + length].decode()).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def _swapped_offsets(text: str) -> str:
    header = json.loads(text)
    header["a"]["data_offsets"], header["b"]["data_offsets"] = header["b"]["data_offsets"], header["a"]["data_offsets"]
    return json.dumps(header, separators=(",", ":"))


def _with_a_second_entry(text: str) -> str:
    return text.replace('"a":', '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"note":"hidden"},"a":')


@pytest.mark.parametrize(
    "change",
    [
        lambda content: _with_header(content, lambda text: text + " " * 8),
        lambda content: _with_header(content, lambda text: text.replace(":[2]", ": [2]")),
        lambda content: _with_header(content, lambda text: text.replace('{"panorgan"', '{"note":"hidden","panorgan"')),
        lambda content: _with_header(content, lambda text: text.replace("version", 'note\\": 1, \\"version')),
        lambda content: _with_header(content, _swapped_offsets),
    ],
    ids=["spaces", "a space", "metadata", "in the head", "order"],
)
def test_bytes_that_hold_anything_else_are_noticed(change):
    """All of these have the same outline: what differs hides behind it."""
    message = Message({"a": torch.ones(2), "b": torch.zeros(2)}, {"x": 1.0})
    changed = change(message.to_bytes())
    assert changed != message.to_bytes()
    outline = Message.outline(changed)
    assert outline.tensors.keys() == message.tensors.keys()
    assert not outline.is_all_of(changed)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content + b"x",
        lambda content: content[:-1],
        lambda content: _with_header(content, lambda text: text.replace('"shape"', '"note":"hidden","shape"', 1)),
        lambda content: _with_header(content, _with_a_second_entry),
    ],
    ids=["longer", "shorter", "in an entry", "twice"],
)
def test_bytes_that_belong_to_no_tensor_are_refused(change):
    changed = change(Message({"a": torch.ones(2), "b": torch.zeros(2)}, {"x": 1.0}).to_bytes())
    with refused("not-a-message", MessageError):
        Message.outline(changed)


@pytest.mark.parametrize("facts", [{"shape": [-1]}, {"shape": [1.5]}, {"dtype": "F33"}, {"shape": None}, {}])
def test_an_outline_without_sense_is_refused(facts):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | facts
    entry = entry if facts else []
    content = _with_header(
        Message({"a": torch.ones(1)}).to_bytes(), lambda text: json.dumps({**json.loads(text), "a": entry})
    )
    with refused("not-a-message", MessageError):
        Message.outline(content)
