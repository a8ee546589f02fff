"""Batches that are cut in the background."""

from __future__ import annotations

import threading

import torch
from refusing import refused

from panorgan.errors import DataError
from panorgan.preparation.batch import PackedBatch
from panorgan.preparation.prefetch import prefetched


def packed(level: float = 0.0) -> PackedBatch:
    """One sample; every voxel of the image is `level`."""
    bits, known = torch.zeros(1, 2, 2, dtype=torch.uint8), torch.ones(1, 1, dtype=torch.bool)
    return PackedBatch(torch.full((1, 1, 2, 2), level), bits, known, ("liver",), ("a",))


def background_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "patches"]


def test_prefetched_batches_are_the_same_in_the_same_order() -> None:
    plain = [packed(level) for level in range(9)]
    ahead = list(prefetched(iter(plain), ahead=2))
    assert len(ahead) == 9
    assert all(one is other for one, other in zip(plain, ahead, strict=True))
    assert not background_threads()


def test_an_error_in_the_thread_is_raised_where_batches_are_used() -> None:
    def break_off():
        yield from (packed(), packed())
        raise DataError("the disk is gone", code="no-disk")

    batches = prefetched(break_off())
    assert len([next(batches), next(batches)]) == 2
    with refused("no-disk"):
        next(batches)
    assert not background_threads()


def test_stopping_early_ends_the_thread() -> None:
    drawn = 0

    def endless():
        nonlocal drawn
        while True:
            drawn += 1
            yield packed()

    batches = prefetched(endless(), ahead=2)
    next(batches)
    assert len(background_threads()) == 1
    batches.close()
    assert not background_threads()
    assert drawn <= 4  # one used, two waiting, one in the hand
