"""One result of preflight: what was found, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from panorgan.errors import PanorganError

Verdict = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """`what` says what was found, `fix` what to do; a passed check needs no fix.

    `code` is a fixed word for a warning or a failure, as in errors.
    """

    name: str
    verdict: Verdict
    what: str
    fix: str = ""
    code: str = ""

    def as_json(self) -> dict[str, str]:
        """Plain JSON types."""
        return asdict(self)


def failed_by(name: str, error: PanorganError) -> Check:
    """An error that a user may see, as a failed check."""
    reasons = [text for label, text in error.details() if label != "fix"]
    what = " ".join([error.what, *(f"({reason})" for reason in reasons)])
    return Check(name, "failed", what, error.fix, error.code)
