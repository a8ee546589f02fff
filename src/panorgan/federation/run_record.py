"""A site's record of a run from its first round on: the plan, its own data, and the models that it has scored.

It lies next to the state (`local_state`) and lets a site detect later differences: another plan, other cases, one more
scoring request. It holds names of cases, so it never leaves the site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from panorgan.checksums import read_json, sealed_json
from panorgan.federation.failures import LostStateError
from panorgan.federation.files import write_atomically

FILE = "run.json"

Scores = dict[str, float]


@dataclass
class RunRecord:
    """`data`: per case a split and a hash of its content. `questions`: per round, the hash of each request to score a
    model, and the answer."""

    run: str
    plan: Mapping[str, Any] | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    questions: dict[str, dict[str, Scores]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it as a whole; it survives a power cut, as the state does."""
        write_atomically(folder / FILE, sealed_json(asdict(self), indent=1), durable=True)


def read_record(folder: Path, run: str) -> RunRecord | None:
    """The record of a run; None if there is none, or it belongs to another run. Raises an error if it is damaged."""
    path = folder / FILE
    try:
        record = RunRecord(**read_json(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    return record if record.run == run else None


def _damaged(path: Path, why: str) -> LostStateError:
    return LostStateError(
        "This site's record of the run cannot be read.",
        where=str(path),
        why=why,
        fix="Restore it from a backup. Once the run is over it is no longer needed and may be removed.",
    )
