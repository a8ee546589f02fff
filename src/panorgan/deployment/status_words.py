"""The state of a federation and of its sites in words: the same in the terminal and on the live page."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from panorgan.deployment.site_status import SiteStatus
    from panorgan.deployment.status import FederationStatus

QUESTIONS = {
    "train": "sites train",
    "evaluate": "sites validate",
    "join": "sites join",
    "deliver": "model goes out",
    "score": "test cases are scored",
}
"""What a run is doing, by the kind of its current task."""
_SITE = {"absent": "not connected", "unknown": "–", "done": "has the model"}
_WORK = {"train": "training", "evaluate": "validating", "join": "joining", "deliver": "taking the model"}


def site_in_words(site: SiteStatus) -> str:
    """`training`, `failed: memory: the site ran out of memory`, `not connected: joins later`."""
    if site.state == "working":
        return _WORK.get(site.detail, "working")
    words = _SITE.get(site.state, site.state)
    return f"{words}: {site.detail}" if site.detail else words


def state_in_words(status: FederationStatus) -> str:
    """`waiting for south`, `interrupted: the driver is not running (last heard of 3 min ago)`."""
    why = status.why
    if status.state in ("interrupted", "silent") and status.updated:
        why += f" (last heard of {ago(status.time - status.updated)})"
    if not why:
        return status.state
    return f"{status.state} {why}" if why.startswith("for ") else f"{status.state}: {why}"


def ago(seconds: float) -> str:
    """`now`, `20 s ago`, `3 min ago`, `5 h ago`, `3 days ago`."""
    if seconds < 1.5:
        return "now"
    if seconds < 100:
        return f"{seconds:.0f} s ago"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.0f} h ago" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days ago"
