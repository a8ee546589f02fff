"""`panorgan report`: of a simulated run, of a federation at its server, or of a site."""

from __future__ import annotations

import json
from pathlib import Path

import panorgan
from panorgan.cli.console import say


def write_and_say(folder: Path, as_json: bool) -> None:
    """Write the report that suits the folder: a run's, or that of a kit."""
    path = _write(folder)
    say(json.dumps({"report": str(path)}) if as_json else f"Report: {path}")


def _write(folder: Path) -> Path:
    if not (folder.expanduser() / "local").is_dir():
        return panorgan.write_report(folder)
    from panorgan.cli.doctor import reading
    from panorgan.cli.federation import find_kit
    from panorgan.deployment.folders import ServerKit

    kit = find_kit(folder)
    if isinstance(kit, ServerKit):
        from panorgan.report.federation_page import write_kit_report

        return write_kit_report(kit)
    from panorgan.report.site_page import write_site_report

    with reading() as show:
        return write_site_report(kit, lambda done, total: show("scoring test cases", done, total))
