"""`panorgan federation init`: make the kits, and show the next steps."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from panorgan.cli.console import Console, say
from panorgan.cli.loading import load
from panorgan.errors import ConfigError

if TYPE_CHECKING:
    from panorgan.deployment.kits import KitsReport
    from panorgan.deployment.settings import FederationSettings

_EXAMPLE = "federation.example.yaml"


def write_example(path: Path, as_json: bool) -> None:
    """Write a commented `federation.yaml`; an existing file is kept."""
    if path.exists():
        raise ConfigError(
            "The file exists already.",
            code="file-exists",
            where=str(path),
            fix="Give another name, or edit that file and omit --example.",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(files("panorgan.cli").joinpath(_EXAMPLE).read_text(encoding="utf-8"), encoding="utf-8")
    if as_json:
        print(json.dumps({"example": str(path)}), flush=True)
        return
    say(f"Wrote {path}. Enter your server, sites and experiment file, then:")
    say(f"  panorgan federation init {path}")


def make_all(federation: Path, out: Path | None, as_json: bool) -> None:
    """Make the missing kits and list all of them."""
    if not federation.exists():
        raise ConfigError(
            "There is no such federation file.",
            code="settings-file-missing",
            where=str(federation),
            fix=f"Check the path, or start from an example: panorgan federation init {federation} --example",
        )
    load("panorgan.deployment.kits")
    from panorgan.deployment.kit_files import load_federation
    from panorgan.deployment.kits import make_kits

    settings, agreement = load_federation(federation)
    report = make_kits(settings, agreement, out or Path(settings.name))
    if as_json:
        content = {
            "folder": str(report.folder),
            "server": str(report.server),
            "sites": {name: str(path) for name, path in report.sites.items()},
            "made": list(report.made),
            "kept": list(report.kept),
            "notes": list(report.notes),
            "experiment": agreement.fingerprint(),
        }
        print(json.dumps(content), flush=True)
        return
    _show(Console(highlight=False), report, settings, agreement.fingerprint())


def _show(console: Console, report: KitsReport, settings: FederationSettings, fingerprint: str) -> None:
    console.print(Text.assemble((settings.name, "bold"), f"  experiment {fingerprint}"))
    table = Table.grid(padding=(0, 2))
    for name, path in {"server": report.server, **report.sites}.items():
        made = name in report.made
        words = Text("made", style="green") if made else Text("unchanged", style="dim")
        table.add_row(Text(f"  {name}"), Text(str(path), overflow="fold"), words)
    console.print(table)
    for note in report.notes:
        console.print(Text(note, style="yellow"), soft_wrap=True)
    console.print()
    for line in next_steps(report, settings):
        console.print(Text(line), soft_wrap=line.startswith("  "))


def next_steps(report: KitsReport, settings: FederationSettings) -> list[str]:
    """The next steps of the coordinator and of each hospital, and what must stay secret."""
    server = settings.server
    lines = []
    if "server" in report.made:
        lines += [
            f"The coordinator: copy {report.server} to {server.host} and open TCP port {server.port} there. Then:",
            "  panorgan federation preflight",
            "  panorgan federation server      (leave it running, or use the systemd unit or Compose file)",
            "  panorgan federation start       (in a second terminal; shows the run)",
        ]
    new = [name for name in report.sites if name in report.made]
    if new:
        lines += [
            f"Each hospital ({', '.join(new)}): send its folder in {report.folder / 'sites'} over a secure "
            "channel (it holds a private key). There:",
            "  edit local/site.yaml            (where the data is)",
            "  panorgan federation approve     (again after every edit)",
            "  panorgan federation preflight",
            "  panorgan federation site        (leave it running)",
        ]
    if not lines:
        return ["Nothing to do: every participant has a kit."]
    secret = report.folder / "ca"
    return [
        *lines,
        f"Keep {secret} secret, with a backup: it is needed to add sites, and its holder can join as any site.",
    ]
