"""Preflight's checks of policies: the hospital's approval, what may leave, and what the server may start."""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from panorgan.deployment.approval import RECORD, deviations, how_to_approve, modules_in
from panorgan.deployment.check import Check, failed_by
from panorgan.deployment.engine import network_engine
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.errors import ConfigError

if TYPE_CHECKING:
    from panorgan.federation.egress import EgressPolicy

# No method sends these. A pattern that lets all of them leave lets anything leave.
_NEVER_SENT = ("patient", "x/y", "a-name.that:nobody+sends/7")


def check_approval(kit: SiteKit) -> Check:
    """Whether the site would start, and answer."""
    name = "approval"
    if found := deviations(kit):
        what = f"This kit is not as it was approved: {found.words()}."
        return Check(name, "failed", what, how_to_approve(kit, found), "not-approved")
    try:
        record = json.loads((kit.local / RECORD).read_text(encoding="utf-8"))
        when = f"{str(record['approved'])[:16].replace('T', ' ')} by {record['by']}"
    except (OSError, ValueError, LookupError, TypeError):
        when = "at some time"
    return Check(name, "ok", f"as approved {when}")


def check_server_policy(kit: ServerKit) -> Check:
    """Whether jobs may name the coordinator's job only; kits of older versions let them name more."""
    name = "jobs"
    if planted := list(modules_in(kit)):
        fix = "Find out who put it there, and move it out of the kit."
        return Check(name, "failed", f"Code lies in the kit: {', '.join(planted)}.", fix, "code-in-kit")
    try:
        network_engine().check_kit(kit.path, "server")
    except FileNotFoundError as error:
        return Check(name, "skipped", f"local/{Path(error.filename).name} is missing")
    except ConfigError as error:
        return failed_by(name, error)
    return Check(name, "ok", "may start the coordinator's part of a run, and nothing else")


def check_open_policy(policy: EgressPolicy) -> Check | None:
    """A warning for `numbers: ['*']` and the like: a thousand numbers a message can be an image too."""
    kinds = {"numbers": policy.numbers, "tensors": tuple(policy.tensors)}
    found = {kind: pattern for kind, patterns in kinds.items() if (pattern := _matches_anything(patterns))}
    if not found:
        return None
    places = ", ".join(f"'{pattern}' under '{kind}'" for kind, pattern in found.items())
    return Check(
        "egress.yaml",
        "warning",
        f"This policy lets anything leave ({places}), whatever a method may send one day.",
        "Name what may leave, as the policy that came with the kit does ('panorgan methods NAME' lists it).",
        "open-policy",
    )


def _matches_anything(patterns: Iterable[str]) -> str | None:
    return next((p for p in patterns if all(fnmatchcase(name, p) for name in _NEVER_SENT)), None)
