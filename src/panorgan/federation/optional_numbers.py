"""Numbers that a site may keep to itself and still take part: they only help people to see what goes wrong.

Whatever else a policy does not name is refused, and the answer with it; these are left out of it instead. So a site
whose policy is older than such a number goes on as before.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from panorgan.federation.egress import EgressPolicy
from panorgan.federation.message import Message

OPTIONAL_NUMBERS = ("volume/*",)
"""The watchdog looks for floods in these."""


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
