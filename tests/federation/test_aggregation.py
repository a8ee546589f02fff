"""The weighted mean per key over the sites that sent it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused

from panorgan.errors import RunError
from panorgan.federation.aggregation import SpooledUpdates
from panorgan.federation.message import Message, MessageFile


def spooled(folder: Path, updates: dict[str, dict[str, torch.Tensor]]) -> SpooledUpdates:
    files = {}
    for site, tensors in updates.items():
        path = folder / f"{site}.safetensors"
        path.write_bytes(Message(tensors, {"cases": 1.0}).to_bytes())
        files[site] = MessageFile(path)
    return SpooledUpdates(files)


def test_mean_by_hand(tmp_path):
    updates = spooled(
        tmp_path,
        {
            "b": {"shared": torch.tensor([1.0, 2.0]), "head:b": torch.tensor([7.0])},
            "a": {"shared": torch.tensor([4.0, 8.0]), "head:a": torch.tensor([5.0])},
        },
    )
    assert updates.sites == ("a", "b")
    weights = {"a": 1.0, "b": 3.0}
    mean = updates.mean(lambda site, key: weights[site])
    # (1·4 + 3·1)/4 and (1·8 + 3·2)/4; heads belong to one site each
    torch.testing.assert_close(mean["shared"], torch.tensor([1.75, 3.5]))
    torch.testing.assert_close(mean["head:a"], torch.tensor([5.0]))
    torch.testing.assert_close(mean["head:b"], torch.tensor([7.0]))


def test_weights_may_differ_per_key_and_zero_leaves_a_key_alone(tmp_path):
    updates = spooled(
        tmp_path, {s: {"x": torch.tensor([v]), "y": torch.tensor([v])} for s, v in (("a", 1.0), ("b", 3.0))}
    )
    mean = updates.mean(lambda site, key: 0.0 if key == "y" else (1.0 if site == "a" else 0.0))
    assert mean.keys() == {"x"}
    assert mean["x"].item() == 1.0


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_types_are_kept_and_equal_tensors_stay_equal(tmp_path, kind):
    value = (torch.randn(50, generator=torch.Generator().manual_seed(0)) * 100).to(kind)
    updates = spooled(tmp_path, {site: {"w": value} for site in "abc"})
    mean = updates.mean(lambda site, key: {"a": 0.1, "b": 0.7, "c": 1.3}[site])
    assert mean["w"].dtype == kind
    assert torch.equal(mean["w"], value)


def test_the_mean_leaves_what_was_sent_alone(tmp_path):
    """Double precision needs no conversion: the sum must not be formed in the answer's own memory."""
    updates = spooled(tmp_path, {s: {"w": torch.tensor([v], dtype=torch.float64)} for s, v in (("a", 2.0), ("b", 4.0))})
    for _ in range(2):
        assert updates.mean(lambda site, key: 1.0)["w"].item() == 3.0
    assert updates.tensor("a", "w").item() == 2.0


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0])
def test_a_weight_that_is_no_weight_is_an_error(tmp_path, weight):
    """Silently leaving the key out would freeze the model."""
    updates = spooled(tmp_path, {s: {"w": torch.ones(1)} for s in "ab"})
    with refused("bad-weight", RunError) as caught:
        updates.mean(lambda site, key: weight if site == "b" else 2.0)
    assert all(name in caught.value.what for name in ("Site b", str(weight), "'w'"))
    assert caught.value.fix


@settings(max_examples=25, deadline=None)
@given(st.permutations(["a", "b", "c", "d"]), st.integers(0, 1000))
def test_order_of_arrival_does_not_matter(tmp_path_factory, order, seed):
    generator = torch.Generator().manual_seed(seed)
    values = {site: {"w": torch.randn(20, generator=generator)} for site in "abcd"}
    weights = dict(zip("abcd", torch.rand(4, generator=generator).tolist(), strict=True))
    folder = tmp_path_factory.mktemp("order")
    one = spooled(folder, values).mean(lambda site, key: weights[site])
    other = spooled(folder, {site: values[site] for site in order}).mean(lambda site, key: weights[site])
    assert torch.equal(one["w"], other["w"])
    low = torch.stack([v["w"] for v in values.values()]).amin(0)
    high = torch.stack([v["w"] for v in values.values()]).amax(0)
    assert ((one["w"] >= low - 1e-6) & (one["w"] <= high + 1e-6)).all()
