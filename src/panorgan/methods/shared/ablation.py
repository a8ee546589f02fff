"""The rows of a paper's module table: a method with only some of its modules switched on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from panorgan.errors import ConfigError


@dataclass(frozen=True)
class AblationRow:
    """One row of the table.

    Attributes
    ----------
    label : the row's name in tables and on the command line; no commas.
    modules : the modules that are on in this row; they get a tick.
    settings : of the method, on top of the experiment's own (`network.…` and `training.…` for those sections).
    method : another method's name, for a row that is not the method itself (`solo`).
    paper : the paper's figure for this row, as it is printed there.
    """

    label: str
    modules: tuple[str, ...]
    settings: Mapping[str, object] = field(default_factory=dict)
    method: str | None = None
    paper: str = ""

    def __post_init__(self) -> None:
        if not self.label.strip() or self.label != self.label.strip() or "," in self.label:
            raise ConfigError(
                f"A row of an ablation cannot be called {self.label!r}.",
                code="ablation-row-name",
                why="rows are named on the command line, separated by commas",
                fix="Give it a name without commas and without spaces at its ends.",
            )


def all_modules(rows: Sequence[AblationRow]) -> tuple[str, ...]:
    """Every module of the rows, in the order of first appearance: the columns of the table."""
    return tuple(dict.fromkeys(module for row in rows for module in row.modules))


__all__ = ["AblationRow", "all_modules"]
