"""FedIOD: the method, and what only it uses. `method` is where to begin; it has the paper's equations in one table."""

from panorgan.methods.fediod.method import (
    ATTRIBUTION,
    DEPTH,
    ENTROPY,
    GATE,
    INTERSECTION,
    LARGEST_SHARE,
    TOKENS,
    UNION,
    FedIOD,
)
from panorgan.methods.fediod.settings import FedIODConfig

__all__ = [
    "ATTRIBUTION",
    "DEPTH",
    "ENTROPY",
    "GATE",
    "INTERSECTION",
    "LARGEST_SHARE",
    "TOKENS",
    "UNION",
    "FedIOD",
    "FedIODConfig",
]
