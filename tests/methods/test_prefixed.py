"""Names under a prefix, there and back."""

from __future__ import annotations

from panorgan.methods.shared.prefixed import prefixed, under


def test_there_and_back_beside_others():
    own = {"encoder.w": 1, "a/encoder.w": 2}
    kept = {**prefixed("a/", own), "b/encoder.w": 3, "encoder.w": 4}
    assert kept == {"a/encoder.w": 1, "a/a/encoder.w": 2, "b/encoder.w": 3, "encoder.w": 4}
    assert under("a/", kept) == own
