"""Egress policies that let everything of a kind leave: valid, but a policy in name only."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from panorgan.deployment.check import Check

if TYPE_CHECKING:
    from panorgan.federation.egress import EgressPolicy

# No method sends these. A pattern that matches all of them lets anything leave.
_NEVER_SENT = ("patient", "x/y", "a-name.that:nobody+sends/7")


def check_open_policy(policy: EgressPolicy) -> Check | None:
    """A warning for `numbers: ['*']` and the like: a thousand numbers per message can be an image."""
    kinds = {"numbers": policy.numbers, "tensors": tuple(policy.tensors)}
    found = {kind: pattern for kind, patterns in kinds.items() if (pattern := _matches_anything(patterns))}
    if not found:
        return None
    places = ", ".join(f"'{pattern}' under '{kind}'" for kind, pattern in found.items())
    return Check(
        "egress.yaml",
        "warning",
        f"This policy lets anything leave ({places}), whatever a method may send in future.",
        "Name what may leave, as the policy that came with the kit does ('panorgan methods NAME' lists it).",
        "open-policy",
    )


def _matches_anything(patterns: Iterable[str]) -> str | None:
    return next((p for p in patterns if all(fnmatchcase(name, p) for name in _NEVER_SENT)), None)
