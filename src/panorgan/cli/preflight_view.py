"""The output of `panorgan federation preflight`: one line per check, the fix below it, a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from panorgan.cli.console import Console
from panorgan.deployment.check import Check

_MARKS = {
    "ok": ("ok", "green"),
    "warning": ("look", "bold yellow"),
    "failed": ("FAIL", "bold red"),
    "skipped": ("–", "dim"),
}
_WIDTH = 120


def show(console: Console, checks: Sequence[Check], ready: str) -> None:
    """Print the checks; `ready` is the next step when nothing failed."""
    width = min(console.width, _WIDTH)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=20)
    table.add_column(overflow="fold")
    for check in checks:
        mark, style = _MARKS[check.verdict]
        table.add_row(Text(mark, style=style), Text(check.name), _what(check))
    console.print(table, width=width)
    console.print()
    console.print(verdict(checks, ready), width=width, highlight=False, soft_wrap=True)


def verdict(checks: Sequence[Check], ready: str) -> Text:
    """One line: may it start?"""
    failed = sum(check.verdict == "failed" for check in checks)
    warned = sum(check.verdict == "warning" for check in checks)
    if failed:
        return Text.assemble((f"{failed} failed", "bold red"), ". Fix that, then run the same command again.")
    if warned:
        look = f"{warned} {'thing' if warned == 1 else 'things'} to check"
        return Text.assemble((look, "bold yellow"), ", nothing failed. ", ready)
    return Text.assemble(("Ready.", "bold green"), " ", ready)


def _what(check: Check) -> RenderableType:
    what = Text(check.what, style="dim" if check.verdict == "skipped" else "")
    if not check.fix:
        return what
    fix = Table.grid(padding=(0, 1))
    fix.add_column(no_wrap=True, style="bold")
    fix.add_column(overflow="fold")
    fix.add_row("fix", Text(check.fix))
    return Group(what, fix)
