"""Messages: the same content gives the same bytes, and bytes that are not ours are refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from panorgan.errors import MessageError
from panorgan.federation.message import Message, MessageFile

names = st.text(
    st.characters(codec="ascii", exclude_characters="\x00", categories=("L", "N", "P")), min_size=1, max_size=12
)
dtypes = st.sampled_from(
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31)))) * 10
    return values.to(draw(dtypes))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(names.filter(lambda n: n != "__metadata__"), tensors(), max_size=4),
    st.dictionaries(names, st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False), max_size=4),
    st.dictionaries(names, st.one_of(st.integers(-(2**53), 2**53), st.text(max_size=5), st.none()), max_size=3),
)
def test_round_trip_is_exact(arrays, numbers, meta):
    message = Message(arrays, numbers, meta)
    back = Message.from_bytes(message.to_bytes())
    assert dict(back.numbers) == numbers
    assert dict(back.meta) == meta
    assert set(back.arrays) == set(arrays)
    for key, value in arrays.items():
        assert back.arrays[key].dtype == value.dtype
        assert back.arrays[key].shape == value.shape
        assert torch.equal(back.arrays[key], value)


def test_equal_messages_give_equal_bytes_whatever_the_order():
    a, b = torch.ones(2), torch.zeros(3)
    one = Message({"a": a, "b": b}, {"x": 1.0, "y": 2.0}).to_bytes()
    other = Message({"b": b, "a": a}, {"y": 2.0, "x": 1.0}).to_bytes()
    assert one == other


def test_a_view_travels_as_what_it_shows():
    matrix = torch.arange(6.0).reshape(2, 3)
    back = Message.from_bytes(Message({"t": matrix.T}).to_bytes())
    assert torch.equal(back.arrays["t"], matrix.T)


def test_tensors_that_share_memory_travel_under_both_names():
    """A server that sends a teacher which is also the global model, say."""
    whole = torch.arange(6.0)
    back = Message.from_bytes(Message({"a": whole, "b": whole, "half": whole[:3]}).to_bytes())
    assert torch.equal(back.arrays["a"], whole)
    assert torch.equal(back.arrays["b"], whole)
    assert torch.equal(back.arrays["half"], whole[:3])


def test_what_is_read_is_the_readers_own():
    content = Message({"w": torch.ones(2)}).to_bytes()
    Message.from_bytes(content).arrays["w"].zero_()
    assert Message.from_bytes(content).arrays["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_not_sent(value):
    with pytest.raises(MessageError, match="not finite"):
        Message(numbers={"loss": value}).to_bytes()


def test_another_version_is_refused_with_the_fix():
    head = json.dumps({"version": 99, "numbers": {}, "meta": {}})
    content = save({"w": torch.ones(1)}, metadata={"panorgan": head})
    with pytest.raises(MessageError, match="version 99") as caught:
        Message.from_bytes(content)
    assert "same panorgan version" in caught.value.fix


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
    with pytest.raises(MessageError):
        Message.from_bytes(content)
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(MessageError):
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
    assert torch.equal(file.array("a"), torch.ones(2, 3))
    assert file.numbers == {"n": 3.0}
    assert file.message().meta == {"site": "north"}
