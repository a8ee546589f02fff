"""How long training takes, and settings for it, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml


def in_words(facts: Mapping[str, Any]) -> str:
    """`about 3 h 20 min: 6000 steps of 1.9 s (3 h 10 min), validation 8 min, scoring 2 min`."""
    step = facts["step_seconds"]
    of = f"{step:.2g} s" if step >= 0.1 else f"{1000 * step:.2g} ms"
    return (
        f"about {span(facts['seconds'])}: {facts['steps']} steps of {of} ({span(facts['training'])}), "
        f"validation {span(facts['validation'])}, scoring {span(facts['scoring'])}"
    )


def estimate_lines(facts: Mapping[str, Any]) -> list[str]:
    """The estimate; where it is long, what would take less time."""
    lines = [f"This will take {in_words(facts)} on this machine's {facts['device']}"]
    if facts.get("later_stages"):
        lines.append(f"Measured in the stage {facts['stage']}; steps of {facts['later_stages']} may take longer.")
    if facts.get("suits"):
        lines.append(f"Settings for about {span(facts['suits_seconds'])}:")
        lines += [f"  {line}" for line in proposal_lines(facts["suits"])]
        lines.append("'panorgan plan EXPERIMENT.yaml --minutes 120' finds such settings and can write them.")
    return lines


def span(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 20 min`, `2 days 4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(round(minutes, -1), 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} days {hours} h" if hours else f"{days} days"


def is_usual(name: str, value: Any) -> bool:
    """Whether a network is like this when nothing is said."""
    return (name, value) in (("network.dimensions", 3), ("network.strides", None))


def proposal_lines(settings: Mapping[str, Any]) -> Iterator[str]:
    """One setting per line, by its dotted name."""
    for name, value in settings.items():
        if is_usual(name, value):
            continue
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
        yield f"{name}: {text}"
