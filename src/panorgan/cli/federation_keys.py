"""`panorgan federation revoke` and `renew`: refuse kits, and extend certificates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from panorgan.cli.console import say, say_lines
from panorgan.errors import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output: one JSON object per line.")]


def revoke(
    who: Annotated[str, typer.Argument(help="A site's name, its kit, or its certificate.", metavar="WHO")],
    kit: Annotated[Path, typer.Option(help="The server's kit.", show_default="this folder")] = Path(),
    as_json: AsJson = False,
) -> None:
    """At the server: refuse a site's kit from its next message on. No restart is needed.

    A name revokes all certificates issued to the site so far; a kit renewed later is accepted.
    """
    from panorgan.cli.federation import server_kit

    found = server_kit(kit, "revoke")  # before the slow imports
    from panorgan.deployment.kit_files import load_coordinator_file
    from panorgan.deployment.revoking import revocation_file, revoke_kit
    from panorgan.federation.revocation import format_moment

    done = revoke_kit(found, who)
    if as_json:
        content = {
            "revoked": done.name,
            "until": format_moment(done.until),
            "changed": done.changed,
            "restart": done.restart,
        }
        print(json.dumps(content), flush=True)
        return
    how = "are refused from now on" if done.changed else "were refused already"
    say(f"Certificates of {done.name} up to {format_moment(done.until)} {how}: {revocation_file(found)}")
    if done.restart:
        say("This server's kit is older than revocation: restart 'panorgan federation server' once.")
    holder = "server" if done.name == load_coordinator_file(found).coordinator else done.name
    say(
        f"If {done.name} stays in the federation: panorgan federation renew {holder}. If not, remove it from "
        "federation.yaml and run 'panorgan federation init' again, or a waiting run keeps waiting."
    )


def renew(
    names: Annotated[
        list[str] | None, typer.Argument(help="'server' and sites; default: all participants.", metavar="NAME")
    ] = None,
    federation: Annotated[Path, typer.Option(help="The federation's file.")] = Path("federation.yaml"),
    out: Annotated[Path | None, typer.Option(help="Folder with the kits; default: the federation's name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make new keys and certificates for existing kits; settings, policies and state are kept.

    Needs the folder `ca` where `init` made the kits.
    """
    if not federation.is_file():  # before the slow imports
        raise ConfigError(
            "There is no such federation file.",
            code="settings-file-missing",
            where=str(federation),
            fix="Run this where the kits were made, or name the file with --federation. A hospital asks the "
            "coordinator for renewed certificates.",
        )
    from panorgan.deployment.kit_files import load_federation
    from panorgan.deployment.renewal import renew_kits

    settings, agreement = load_federation(federation)
    done = renew_kits(settings, agreement, out or Path(settings.name), names or ())
    if as_json:
        content = [{"name": one.name, "kit": str(one.folder), "here": one.here, "expires": one.expires} for one in done]
        print(json.dumps({"renewed": content}), flush=True)
        return
    for one in done:
        what = "its kit is not here: new files" if not one.here else "renewed"
        say(f"  {one.name}  {one.folder}  {what}, valid until {one.expires}")
    say_lines(_NEXT)


_NEXT = """\
For a kit that is on another machine: send its 'startup' folder over a secure channel (it holds a private key), and
copy its files over those in the kit (at a site: 'panorgan federation approve --edit' first). Then approve a site's kit
again, and restart its process.
After renewing the server, restart every site once.
"""
