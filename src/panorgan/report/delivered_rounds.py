"""Which round each run delivers. The best validated one may lie far before the last, and before a module began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from panorgan.federation.notices import DELIVERED_EARLY
from panorgan.report.record import RunRecord
from panorgan.report.tables import NOTHING


def delivered_words(records: Sequence[RunRecord]) -> str:
    """``60, 60, 30 of 60``, run by run; a dash for a model that was taken away."""
    if not records:
        return NOTHING
    listed = ", ".join(NOTHING if r.delivered_round is None else str(r.delivered_round) for r in records)
    return f"{listed} of {_total(records) or '?'}"


def delivered_columns(records: Sequence[RunRecord]) -> dict[str, object]:
    """The same for a table that programs read: `rounds`, and `delivered_rounds` with blanks between them."""
    delivered = " ".join("?" if r.delivered_round is None else str(r.delivered_round) for r in records)
    return {"rounds": _total(records) or "", "delivered_rounds": delivered}


def delivered_as_json(record: RunRecord) -> dict[str, Any]:
    """Of one run."""
    return {"delivered_round": record.delivered_round, "rounds": record.total_rounds}


def delivered_line(records: Mapping[str, Sequence[RunRecord]]) -> str:
    """All methods in a line: one sentence where every run delivers its last round."""
    runs = [record for some in records.values() for record in some]
    if all(record.delivered_round == record.total_rounds for record in runs):
        return "Delivered: the last round of every run."
    told = "; ".join(f"{label} {delivered_words(some)}" for label, some in records.items() if some)
    return f"Delivered rounds, by seed: {told}."


def delivered_early(records: Mapping[str, Sequence[RunRecord]]) -> list[str]:
    """Runs that say that they deliver a round from before a module began, each with what to do."""
    return [
        f"{label} · seed {record.manifest['experiment']['seed']}: {event.facts['text']}"
        for label, some in records.items()
        for record in some
        for event in record.happenings
        if event.kind == "notice" and event.facts.get("code") == DELIVERED_EARLY
    ]


def _total(records: Sequence[RunRecord]) -> int | None:
    return max((record.total_rounds for record in records if record.total_rounds), default=None)
