"""The round that each run delivers: the best validated one may come long before the last, or before a module begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from panorgan.federation.notices import DELIVERED_EARLY
from panorgan.report.tables import NOTHING
from panorgan.workflows.run import Run


def delivered_words(runs: Sequence[Run]) -> str:
    """``60, 60, 30 of 60``, run by run; a dash for a model that was removed."""
    if not runs:
        return NOTHING
    listed = ", ".join(NOTHING if r.delivered_round is None else str(r.delivered_round) for r in runs)
    return f"{listed} of {_total(runs) or '?'}"


def delivered_columns(runs: Sequence[Run]) -> dict[str, object]:
    """The same for a table that programs read: `rounds`, and `delivered_rounds` with blanks between them."""
    delivered = " ".join("?" if r.delivered_round is None else str(r.delivered_round) for r in runs)
    return {"rounds": _total(runs) or "", "delivered_rounds": delivered}


def delivered_as_json(run: Run) -> dict[str, Any]:
    """Of one run."""
    return {"delivered_round": run.delivered_round, "rounds": run.total_rounds}


def delivered_line(runs: Mapping[str, Sequence[Run]]) -> str:
    """All methods in a line: one sentence where every run delivers its last round."""
    if all(run.delivered_round == run.total_rounds for some in runs.values() for run in some):
        return "Delivered: the last round of every run."
    listed = "; ".join(f"{label} {delivered_words(some)}" for label, some in runs.items() if some)
    return f"Delivered rounds, by seed: {listed}."


def delivered_early(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Notices of runs that deliver a round from before a module began, each with what to do."""
    return [
        f"{label} · seed {run.manifest['experiment']['seed']}: {event.facts['text']}"
        for label, some in runs.items()
        for run in some
        for event in run.notable_events
        if event.kind == "notice" and event.facts.get("code") == DELIVERED_EARLY
    ]


def _total(runs: Sequence[Run]) -> int | None:
    return max((run.total_rounds for run in runs if run.total_rounds), default=None)
