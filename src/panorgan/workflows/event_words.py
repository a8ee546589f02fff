"""Events of a run as text, the same in the terminal, in logs and on pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from panorgan.federation.events import DAMAGED, Event
from panorgan.federation.failures import MEANING


def event_line(event: Event) -> str:
    """One line for a log; empty if the event is not worth one."""
    tell = _LINES.get(event.kind)
    return tell(event.facts) if tell else ""


def mean_validation(facts: Mapping[str, Any]) -> float | None:
    """Mean over sites of the mean over their structures, by which the coordinator selects the best round."""
    scores = [sum(s.values()) / len(s) for s in (facts.get("validation") or {}).values() if s]
    return sum(scores) / len(scores) if scores else None


def mean_per_structure(validation: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Mean over the sites that annotate a structure."""
    found: dict[str, list[float]] = {}
    for scores in validation.values():
        for structure, value in scores.items():
            found.setdefault(structure, []).append(value)
    return {structure: sum(values) / len(values) for structure, values in found.items()}


def joined_in_words(facts: Mapping[str, Any]) -> str:
    """`north (8 cases: liver, spleen), south (5 cases: kidney)`."""
    return ", ".join(
        f"{site} ({own['train_cases']} case{'s' * (own['train_cases'] != 1)}: {', '.join(sorted(own['annotated']))})"
        for site, own in sorted(facts["sites"].items())
    )


def split_in_words(facts: Mapping[str, Any]) -> str:
    """`north 8 train, 2 validation, 3 test; south …`, in cases."""
    sites = sorted(facts["sites"].items())
    return "; ".join(
        f"{site} {', '.join(f'{count} {split}' for split, count in own.items() if count)}" for site, own in sites
    )


def shared_in_words(facts: Mapping[str, Any]) -> str:
    """A warning that names the scans."""
    return f"WARNING: scans are used twice (allow_shared_scans): {'; '.join(facts['scans'])}"


def refused_in_words(facts: Mapping[str, Any]) -> str:
    """Why an update was refused, and what to do where that is known."""
    return " ".join(part for part in (facts["reason"], facts.get("why", ""), facts.get("fix", "")) if part)


def round_in_words(number: int) -> str:
    """Introductions have the number 0."""
    return f"round {number}" if number else "when joining"


def duration(seconds: float) -> str:
    """`75` → `1:15`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def seconds_in_words(value: float) -> str:
    """`3.2 s`, `75 s`, `3:10`."""
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s" if value < 120 else duration(value)


def _round_line(facts: dict[str, Any]) -> str:
    losses = ", ".join(f"{site} {own['loss']:.3f}" for site, own in facts["sites"].items() if "loss" in own)
    score = mean_validation(facts)
    parts = [
        f"round {facts['number']}/{facts['total']} ({facts['stage']})",
        seconds_in_words(sum((facts.get("seconds") or {}).values())),
        f"validation Dice {score:.3f}" if score is not None else "",
        f"loss {losses}" if losses else "",
    ]
    return "  ".join(part for part in parts if part)


def _failure_line(facts: dict[str, Any]) -> str:
    code = facts["code"]
    return f"{facts['site']} failed, {round_in_words(facts['number'])}: {code} ({MEANING.get(code, 'unknown reason')})"


def _late_join_line(facts: dict[str, Any]) -> str:
    return f"joins late: {joined_in_words({'sites': {facts['site']: facts}})}, from round {facts['number']}"


def _driver_line(facts: dict[str, Any]) -> str:
    if facts.get("state") == "running":
        return f"segment {facts.get('segment')} {facts['why']}".rstrip() if facts.get("why") else ""
    if facts.get("state") == "waiting" and not facts.get("why"):  # between two segments: the next line says more
        return ""
    return f"{facts.get('state', '')} {facts.get('why', '')}".rstrip()


_LINES: dict[str, Callable[[dict[str, Any]], str]] = {
    "started": lambda facts: "a new run",
    "resumed": lambda facts: "the run continues with more rounds" if facts.get("extended") else "the run continues",
    "split": lambda facts: f"split: {split_in_words(facts)}",
    "shared_scans": shared_in_words,
    "joined": lambda facts: f"joined: {joined_in_words(facts)}",
    "late_join": _late_join_line,
    "start_from": lambda facts: str(facts["text"]),
    "round": _round_line,
    "refused": lambda f: f"refused {f['site']}, {round_in_words(f['number'])}: {refused_in_words(f)}",
    "failed": _failure_line,
    "notice": lambda facts: f"{round_in_words(facts['number'])}: {facts['text']}",
    "missing": lambda facts: f"missing, {round_in_words(facts['number'])}: {', '.join(facts['sites'])}",
    "segment": lambda facts: f"segment {facts['number']} runs as job {str(facts.get('job', ''))[:8]}",
    "driver": _driver_line,
    "finished": lambda facts: "finished",
    DAMAGED: lambda facts: f"line {facts['line']} of events.jsonl is damaged: its content is missing here",
}
