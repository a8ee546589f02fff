"""What a site remembers of a run from its first round on: the plan, its own data, and the models that it has scored.

It lies beside the state (`local_state`) and lets a site notice what differs later: another plan, other cases, one more
question. It holds names of cases, so it never leaves the site.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from panorgan.federation.failures import LostStateError
from panorgan.federation.files import write_atomically

FILE = "run.json"
_CHECKSUM = "sha256"

Scores = dict[str, float]


@dataclass
class RunRecord:
    """`data`: per case a split and a hash of its content. `questions`: per round, the hash of each request to score a
    model, and what was answered."""

    run: str
    plan: Mapping[str, Any] | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    questions: dict[str, dict[str, Scores]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it as a whole; it survives a power cut, as the state does."""
        content = asdict(self)
        write_atomically(
            folder / FILE, json.dumps({**content, _CHECKSUM: _checksum(content)}, indent=1) + "\n", durable=True
        )


def read_record(folder: Path, run: str) -> RunRecord | None:
    """The record of a run; None if there is none, or that of another run. Raises where it is damaged."""
    path = folder / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        checksum = content.pop(_CHECKSUM)
        record = RunRecord(**content)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if checksum != _checksum(content):
        raise _damaged(path, "its checksum does not fit its content")
    return record if record.run == run else None


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _damaged(path: Path, why: str) -> LostStateError:
    return LostStateError(
        "What this site remembers of the run cannot be read.",
        where=str(path),
        why=why,
        fix="Restore it from a backup. Once the run is over it is of no use any more and may be removed.",
    )
