"""Numbers that a site may withhold and still take part: they only help people to diagnose a run.

Anything else that a policy does not name is refused together with the answer; these are removed from it instead. So a
site whose policy is older than such a number continues as before.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from panorgan.federation.egress import EgressPolicy
from panorgan.federation.message import Message

OPTIONAL_NUMBERS = ("volume/*",)
"""The watchdog detects flooding organs by these."""


def without_kept(answer: bytes, policy: EgressPolicy) -> tuple[bytes, list[str]]:
    """An answer without the optional numbers that a policy does not name, and their names."""
    message = Message.from_bytes(answer)
    kept = [
        name
        for name in message.scalars
        if any(fnmatchcase(name, pattern) for pattern in OPTIONAL_NUMBERS)
        and not any(fnmatchcase(name, pattern) for pattern in policy.numbers)
    ]
    if not kept:
        return answer, []
    numbers = {name: value for name, value in message.scalars.items() if name not in kept}
    return Message(message.tensors, numbers, message.meta).to_bytes(), kept
