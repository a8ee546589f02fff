"""Requests that a site refuses because they exceed the agreement, recorded in its egress log."""

from __future__ import annotations

import hashlib

from panorgan.federation.audit import AuditLog
from panorgan.federation.failures import NotAgreedError, TooManyQuestionsError
from panorgan.federation.tasks import Task

_LONGEST = 100


def note_refusal(audit: AuditLog, request: bytes, task: Task, error: NotAgreedError) -> None:
    """Record what was asked and why it was refused; for scoring requests, how many were answered and agreed."""
    entry = {
        "direction": "in",
        "kind": "refused",
        "task": task.kind,
        "stage": _plain(task.round_info.stage),
        "round": task.round_info.round,
        "run": _plain(task.run),
        "code": error.code,
        "reasons": [_plain(error.what, 2 * _LONGEST), *([_plain(error.why, 4 * _LONGEST)] if error.why else [])],
    }
    if isinstance(error, TooManyQuestionsError):
        entry |= {"answered": error.answered, "agreed": error.agreed}
    audit.append({**entry, "bytes": len(request), "sha256": hashlib.sha256(request).hexdigest()})


def _plain(text: str, longest: int = _LONGEST) -> str:
    """Untrusted text, made printable."""
    return (text if text.isprintable() else ascii(text))[:longest]
