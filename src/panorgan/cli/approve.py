"""`panorgan federation approve`: a hospital approves its kit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from panorgan.cli.console import say
from panorgan.errors import ConfigError


def approve(
    kit: Annotated[Path, typer.Argument(help="The site's kit.", metavar="KIT", show_default="this folder")] = Path(),
    edit: Annotated[
        bool, typer.Option("--edit", help="Approve nothing; allow editing (or deleting) the files again.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output: one JSON object per line.")] = False,
) -> None:
    """Approve a site's kit as it is now: settings, egress policy, keys. Without it the site does not start.

    Run it after editing `local/site.yaml` or `local/egress.yaml`. Later changes are detected and stop the site.
    """
    from panorgan.cli.federation import site_kit
    from panorgan.deployment import approval
    from panorgan.deployment.kit_files import load_site_file

    found = site_kit(kit, "approve")
    if edit:
        approval.reopen(found)
        words = f"{found.local} may be edited. Afterwards: panorgan federation approve {found.path}"
        say(json.dumps({"editable": str(found.local)}) if as_json else words)
        return
    before = approval.approve(found)
    if as_json:
        news = {"changed": before.changed, "missing": before.missing, "added": before.added}
        print(json.dumps({"approved": str(found.path), "first": before.never_approved, **news}), flush=True)
        return
    for name in (*before.changed, *before.missing, *before.added):
        say(f"  other than before: {name}")
    say(f"Approved: {found.path}. local/ and startup/ are read-only now; a change there stops the site.")
    try:
        load_site_file(found)
    except ConfigError as error:
        say(f"local/site.yaml cannot be used yet: {error.what} {error.fix} Then approve again.")
    say(f"Check the rest with: panorgan federation preflight {found.path}")
