"""The two forms of a batch."""

from __future__ import annotations

import torch

from panorgan.preparation.batch import Batch, PackedBatch


def packed(level: float = 0.0) -> PackedBatch:
    """Two samples of one structure; every voxel of the images is `level`."""
    image, bits = torch.full((2, 1, 2, 2), level), torch.zeros(2, 2, 2, dtype=torch.uint8)
    known = torch.ones(2, 1, dtype=torch.bool)
    return PackedBatch(image, bits, known, ("liver",), ("a", "b"), spacing=torch.ones(2, 2), axes=(0, 1))


def test_unpack_by_hand() -> None:
    bits = torch.tensor([[[0b000, 0b101], [0b010, 0b111]]])
    annotated = torch.tensor([[True, False, True]])
    batch = PackedBatch(torch.zeros(1, 1, 2, 2), bits, annotated, ("x", "y", "z"), ("a",)).unpack()
    assert batch.masks.int().tolist() == [[[[0, 1], [0, 1]], [[0, 0], [1, 1]], [[0, 1], [0, 1]]]]
    assert batch.annotated is annotated


def test_unpack_reaches_the_highest_place() -> None:
    bits = torch.tensor([[[1 << 62, 1]]])
    names = tuple(f"s{t}" for t in range(63))
    masks = (
        PackedBatch(torch.zeros(1, 1, 1, 2), bits, torch.ones(1, 63, dtype=torch.bool), names, ("a",)).unpack().masks
    )
    assert masks.nonzero()[:, 1:].tolist() == [[0, 0, 1], [62, 0, 0]]


def test_assuming_unknown_is_absent() -> None:
    masks = torch.ones(2, 2, 1, 1, 3, dtype=torch.bool)
    annotated = torch.tensor([[True, False], [False, True]])
    batch = Batch(torch.zeros(2, 1, 1, 1, 3), masks, annotated, ("x", "y"), ("a", "b"))
    naive = batch.assuming_unknown_is_absent()
    assert naive.annotated.all()
    assert naive.masks.flatten(2).all(2).tolist() == [[True, False], [False, True]]
    assert naive.masks.flatten(2).any(2).tolist() == [[True, False], [False, True]]
    assert batch.masks.all()
    assert torch.equal(batch.annotated, annotated)


def test_moving_to_the_cpu_changes_nothing() -> None:
    batch = packed()
    assert batch.to(torch.device("cpu")) is batch


def test_moving_to_another_device_moves_all_but_the_voxel_sizes() -> None:
    """Augmentation reckons with those, and does so on the CPU."""
    moved = packed().to(torch.device("meta"))
    assert {t.device.type for t in (moved.image, moved.bits, moved.annotated)} == {"meta"}
    assert moved.spacing.device.type == "cpu"
