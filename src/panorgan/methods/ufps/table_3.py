"""UFPS's module table (its Table 3), for `panorgan ablate`: the switches of every row, and its printed results."""

from __future__ import annotations

from collections.abc import Mapping

from panorgan.methods.shared.ablation import AblationRow

_SWITCHES: Mapping[str, tuple[str, object, object]] = {
    # module: (its field, on, off)
    "aRCE": ("reverse_ce", True, False),
    "WS": ("weight_schedule", "tail_shift", "none"),
    "UA": ("uncertainty_aware", "decoder", "none"),
    "GMT": ("main_teacher", True, False),
    "sUSAM": ("sharpness", "susam", "none"),
}
_FIGURES = {
    # mean Dice over the paper's four clients, in percent
    "PL": "73.07",
    "PL aRCE": "73.34",
    "PL WS": "74.22",
    "PL UA": "73.67",
    "PL GMT": "74.27",
    "PL sUSAM": "74.04",
    "PL aRCE WS": "74.39",
    "PL aRCE WS UA": "74.44",
    "PL aRCE WS UA GMT": "74.83",
    "PL aRCE WS UA GMT sUSAM": "74.95",
}


def _table_3() -> tuple[AblationRow, ...]:
    """The paper's module table: alone, with pseudo labels, each module by itself, then one after another."""
    rows = [AblationRow("SOLO", (), method="solo", paper="70.05")]
    for label, figure in _FIGURES.items():
        modules = tuple(label.split())
        settings = {field: on if name in modules else off for name, (field, on, off) in _SWITCHES.items()}
        rows.append(AblationRow(label, modules, settings, paper=figure))
    return tuple(rows)


TABLE_3 = _table_3()
