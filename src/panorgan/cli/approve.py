"""`panorgan federation approve`: a hospital approves its kit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from panorgan.cli.console import say
from panorgan.errors import PanorganError

if TYPE_CHECKING:
    from panorgan.deployment.folders import SiteKit


def approve(
    kit: Annotated[Path, typer.Argument(help="The site's kit.", metavar="KIT", show_default="this folder")] = Path(),
    edit: Annotated[bool, typer.Option("--edit", help="Make the files editable again instead of approving.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output: one JSON object per line.")] = False,
) -> None:
    """Approve a site's kit as it is now: settings, egress policy, keys. Without it the site does not start.

    Run it after editing `local/site.yaml` or `local/egress.yaml`. Later changes are detected and stop the site.
    """
    from panorgan.cli.federation import site_kit

    found = site_kit(kit, "approve")  # before the slow imports
    from panorgan.deployment import approval

    if edit:
        approval.reopen(found)
        words = f"{found.local} may be edited. Afterwards: panorgan federation approve {found.path}"
        say(json.dumps({"editable": str(found.local)}) if as_json else words)
        return
    before = approval.approve(found)
    trouble = _trouble(found)
    if as_json:
        news = {"changed": before.changed, "missing": before.missing, "added": before.added, "trouble": trouble}
        print(json.dumps({"approved": str(found.path), "first": before.never_approved, **news}), flush=True)
        return
    for name in (*before.changed, *before.missing, *before.added):
        say(f"  other than before: {name}")
    say(f"Approved: {found.path}. local/ and startup/ are read-only now; a change there stops the site.")
    if trouble:
        say(f"The site cannot take part yet: {trouble['error']} [{trouble['code']}]")
        for label in ("where", "why", "fix"):
            if text := trouble.get(label):
                say(f"  {label + ':':<7}{text}".replace("\n", "\n         "))
        say(f"To edit again: panorgan federation approve {found.path} --edit; then approve again.")
    say(f"Check the rest with: panorgan federation preflight {found.path}")


def _trouble(kit: SiteKit) -> dict[str, str] | None:
    """Why site.yaml cannot be used as it is; None if it can."""
    from panorgan.data.layouts.base import missing_folder
    from panorgan.deployment.kit_files import load_site_file

    try:
        site = load_site_file(kit)
        if not site.data.folder.exists():
            raise missing_folder(site.data.folder, site.name)
    except PanorganError as error:
        return {"error": error.what, "code": error.code, **dict(error.details())}
    return None
