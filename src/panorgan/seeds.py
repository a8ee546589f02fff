"""Seeds that depend on names, not on the order in which things happen."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: object) -> int:
    """A 63-bit seed from the experiment's seed and what it is for (`derive_seed(0, "north", "train", 3)`)."""
    text = "/".join(str(name) for name in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
