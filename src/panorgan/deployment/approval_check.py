"""Preflight checks of what may run: is the kit as the hospital approved it, and is the server's policy ours?"""

from __future__ import annotations

import json

from panorgan.deployment.approval import RECORD, deviations, how_to_approve, modules_in
from panorgan.deployment.check import Check
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.federation.transports.nvflare.policies import SERVER_CLASSES


def check_approval(kit: SiteKit) -> Check:
    """Whether the site would start, and answer."""
    name = "approval"
    if found := deviations(kit):
        what = f"This kit differs from what was approved: {found.words()}."
        return Check(name, "failed", what, how_to_approve(kit, found), "not-approved")
    try:
        record = json.loads((kit.local / RECORD).read_text(encoding="utf-8"))
        when = f"{str(record['approved'])[:16].replace('T', ' ')} by {record['by']}"
    except (OSError, ValueError, LookupError, TypeError):
        when = "at an unknown time"
    return Check(name, "ok", f"as approved {when}")


def check_server_policy(kit: ServerKit) -> Check:
    """Whether jobs may name only the coordinator's job; kits of older versions allow more."""
    name = "jobs"
    path = kit.local / "resources.json"
    custom = [folder for folder in (kit.local / "custom", kit.admin / "local" / "custom") if folder.exists()]
    if planted := [*modules_in(kit), *(folder.relative_to(kit.path).as_posix() for folder in custom)]:
        fix = "Find out how it got there, and move it out of the kit."
        return Check(name, "failed", f"The kit contains code: {', '.join(planted)}.", fix, "code-in-kit")
    try:
        allowed = json.loads(path.read_text(encoding="utf-8"))["class_allow_list"]
    except FileNotFoundError:
        return Check(name, "skipped", "local/resources.json is missing")
    except (OSError, ValueError, LookupError, TypeError) as error:
        what = f"local/resources.json cannot be read ({error})."
        return Check(name, "failed", what, "Restore it from the kit.", "resources-unreadable")
    if allowed != SERVER_CLASSES:
        what = f"Jobs may name more than they need: class_allow_list in local/resources.json is {allowed}."
        return Check(name, "failed", what, f"Write there: {json.dumps(SERVER_CLASSES)}", "jobs-too-free")
    return Check(name, "ok", "may start the coordinator's part of a run, and nothing else")
