"""`panorgan federation egress`: what has left a site, and whether its log can be trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from panorgan.cli.console import Console
from panorgan.errors import ConfigError

if TYPE_CHECKING:
    from panorgan.federation.audit import AuditReport

BROKEN = 1
# Enough of a hash to compare by eye; --json has all of it.
_SHOWN_HASH = 8
_STYLES = {"sent": "", "refused": "yellow", "failed": "dim", "torn": "dim"}
_WORDS = {"sent": "sent", "refused": "refused", "torn": "unfinished"}


def egress(
    kit: Annotated[Path, typer.Argument(help="A site's kit, or a copy of its log.", metavar="KIT")] = Path("."),
    last: Annotated[int, typer.Option(min=0, help="Number of newest entries to show; 0 for all.")] = 20,
    verify_only: Annotated[bool, typer.Option("--verify-only", help="Only verify the log.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output: one JSON object per line.")] = False,
) -> None:
    """Show what has left this site, and verify the log.

    Exit code: 0 when the log is sound, 1 when it was changed or is incomplete.
    """
    from panorgan.federation.audit import read_log

    path = _log_of(kit)
    report, entries = read_log(path)
    shown = [] if verify_only else entries[-last:] if last else entries
    if as_json:
        for entry in shown:
            print(json.dumps({"entry": entry}))
        print(json.dumps({"result": {"log": str(path), **report.as_json()}}), flush=True)
    else:
        _show(Console(highlight=False), path, report, entries, shown)
    raise typer.Exit(0 if report.ok else BROKEN)


def _log_of(kit: Path) -> Path:
    """The log of a kit; a file is treated as the log itself."""
    if kit.is_file():
        return kit
    from panorgan.deployment.folders import ServerKit, SiteKit

    site = SiteKit(kit)
    if not site.settings.is_file() and not site.audit_log.is_file():
        fix = "Give the folder that the site received, at the site: panorgan federation egress KIT."
        if not kit.exists():
            raise ConfigError("There is no such folder.", code="kit-missing", where=str(kit), fix=fix)
        is_server = ServerKit(kit).settings.is_file()
        raise ConfigError(
            "This is the server's kit; what leaves a site is logged at the site."
            if is_server
            else "This is not a site's kit.",
            code="is-server-kit" if is_server else "not-a-kit",
            where=str(kit),
            why="" if is_server else f"there is neither {site.settings.name} nor {site.audit_log.name}",
            fix=fix,
        )
    return site.audit_log


def _show(
    console: Console, path: Path, report: AuditReport, entries: Sequence[Mapping[str, Any]], shown: Sequence[Any]
) -> None:
    if shown:
        console.print(_table(shown, len(entries)))
        for entry in shown:
            for reason in entry.get("reasons", ()):
                console.print(f"[yellow]{entry['n']} refused:[/] {escape(reason)}", soft_wrap=True)
    sent = [entry for entry in entries if entry["kind"] in ("sent", "failed")]
    size = sum(entry["bytes"] for entry in sent) / 1e6
    refused = [entry for entry in entries if entry["kind"] == "refused"]
    asked = sum(map(_came_in, refused))
    if entries:
        console.print(
            f"Left this site: {_count(len(sent), 'message')}, {size:.2f} MB. Refused: {len(refused) - asked}."
            + (f" Requests beyond the agreement, declined: {asked}." if asked else "")
        )
        scored = {(entry.get("run"), entry["sha256"]) for entry in sent if entry.get("task") == "evaluate"}
        if scored:
            runs = len({run for run, _ in scored})
            console.print(f"Models scored on validation cases: {len(scored)}, in {_count(runs, 'run')}.")
    elif report.ok:
        console.print("Nothing has left this site yet.")
    _verdict(console, path, report)


def _came_in(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is about a request, not about an answer."""
    return entry.get("direction") == "in"


def _table(entries: Sequence[Mapping[str, Any]], total: int) -> Table:
    hidden = "" if len(entries) == total else f", the last {len(entries)} of {total}"
    # Narrow: everything must fit into 80 columns.
    table = Table(title=f"What left this site{hidden}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("time (UTC)", no_wrap=True)
    table.add_column("task")
    table.add_column("what", overflow="fold")
    for name in ("tensors", "numbers", "MB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("SHA-256", no_wrap=True)
    for entry in entries:
        kind = entry["kind"]
        numbers = len(entry["numbers"]) if "numbers" in entry else ""
        table.add_row(
            str(entry["n"]),
            entry["time"][:16].replace("T", " "),
            _task(entry),
            "declined"
            if _came_in(entry)
            else escape(entry["code"] if kind == "failed" else _WORDS.get(kind, str(kind))),
            str(entry.get("tensors", "")),
            str(numbers),
            f"{entry['bytes'] / 1e6:.2f}" if kind in ("sent", "failed", "refused") and not _came_in(entry) else "",
            entry["sha256"][:_SHOWN_HASH],
            style=_STYLES.get(kind, ""),
        )
    return table


def _task(entry: Mapping[str, Any]) -> str:
    """Task and round, `train 3`; with the stage where that says something new: `pretrain 3`, `evaluate pretrain 3`."""
    task, stage, round_ = entry.get("task", ""), entry.get("stage", ""), entry.get("round", 0)
    words = [task] if not stage or stage == "train" else [stage] if task == "train" else [task, stage]
    return escape(" ".join([*words, *([str(round_)] if round_ else [])]))


def _verdict(console: Console, path: Path, report: AuditReport) -> None:
    if not report.ok:
        place = f", line {report.line}" if report.line else ""
        console.print("[bold red]The log does not verify.[/]")
        console.print(f"  where: {escape(str(path))}{place}", soft_wrap=True)
        console.print(f"  why:   {escape(report.why)}", soft_wrap=True)
        console.print(
            f"  fix:   {_count(report.entries, 'entry', 'entries')} before that can be trusted. Find out who changed "
            "it. Nothing leaves until log and head file are moved away.",
            soft_wrap=True,
        )
        return
    if report.unfinished:
        console.print(
            f"[dim]There is an unfinished line of {report.unfinished} bytes at the end: writing was interrupted, "
            "and its message did not leave. The next entry will say so.[/]",
            soft_wrap=True,
        )
    if report.entries:
        console.print(f"[bold green]The log is sound:[/] {_count(report.entries, 'entry', 'entries')}.")
        console.print(f"[dim]Newest hash, to keep elsewhere: {report.head}[/]", soft_wrap=True)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
