"""What every method gains over each site alone: gap closed, worst site, worst organ; as words, rows, JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from panorgan.evaluation.gap import Gain, Share
from panorgan.report.comparison_results import ALL_LABELS, ALONE, Results
from panorgan.report.tables import NOTHING

_GAP = (
    f"Gap closed: (method − {ALONE}) / ({ALL_LABELS} − {ALONE}), of mean Dice over the same test cases and seeds; 0 is "
    "every site alone, 1 all labels in one place. In brackets the 95 % interval of a bootstrap that draws seeds, and "
    "in each seed patients. There is none where the gap itself is not beyond chance. "
)
_WORST = (
    "Worst site: the one that gains least on organs that it labels itself. Worst organ: the lowest Dice relative to "
    f"alone, in any seed. Alone: the sites' own models together, as {ALONE} delivers them; where several sites label "
    "an organ, their mean."
)


def gap_note(results: Results) -> str:
    """The meaning of the columns that are present."""
    has_gap = any(gain.inside or gain.outside for gain in results.gains.values())
    return (_GAP if has_gap else "") + _WORST


def gain_headings(results: Results) -> list[str]:
    """The columns that have values."""
    return [heading for heading, _ in _columns(results)]


def gain_rows(results: Results) -> Iterator[tuple[str, list[str]]]:
    """Method and cells, in the order of the comparison."""
    for method in results.comparison.methods:
        if method in results.gains:
            yield method, [cell(results.gains[method]) for _, cell in _columns(results)]


def gains_as_json(results: Results) -> dict[str, Any]:
    """By method; undefined values are NaN."""
    return {method: asdict(gain) for method, gain in results.gains.items()}


def share_words(share: Share | None) -> str:
    """``62 % [41, 88]``; a word where there is no gap to close."""
    if share is None:
        return NOTHING
    if math.isnan(share.closed):
        return "no clear gap"
    return f"{_percent(share.closed)} % [{_percent(share.low)}, {_percent(share.high)}]"


def _columns(results: Results) -> list[tuple[str, Any]]:
    gains = results.gains.values()
    columns: list[tuple[str, Any]] = []
    if any(gain.inside for gain in gains):
        columns.append(("gap closed", lambda gain: share_words(gain.inside)))
    if any(gain.outside for gain in gains):
        columns.append(("at external sites", lambda gain: share_words(gain.outside)))
    return [*columns, ("worst site", _site), ("worst organ", _organ)]


def _site(gain: Gain) -> str:
    if not gain.worst_site:
        return NOTHING
    return f"{gain.worst_site} {gain.site_difference:+.3f}".replace("-0.", "−0.")


def _organ(gain: Gain) -> str:
    if not gain.worst_organ:
        return NOTHING
    return f"{gain.worst_organ.replace('_', ' ')} {gain.organ_ratio:.2f} × (seed {gain.organ_seed})"


def _percent(value: float) -> str:
    return f"{round(100 * value):d}".replace("-", "−")  # an integer has no −0
