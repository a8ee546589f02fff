"""`panorgan federation`: a real federation between hospitals, from making the kits to stopping a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from panorgan.cli.approve import approve
from panorgan.cli.console import say
from panorgan.cli.egress import egress
from panorgan.cli.federation_keys import renew, revoke
from panorgan.cli.loading import load
from panorgan.errors import ConfigError

if TYPE_CHECKING:
    from panorgan.deployment.folders import ServerKit, SiteKit

app = typer.Typer(
    help="Run a federation between hospitals: make kits, run server and sites, start and follow the run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

KitPath = Annotated[Path, typer.Argument(help="The participant's kit.", metavar="KIT", show_default="this folder")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output: one JSON object per line.")]

FAILED = ConfigError.exit_code
TROUBLED = 1
_HERE = Path()


@app.callback()
def _installed_code_only() -> None:
    """For every command: a kit's folder, in which it may run, must not be imported from."""
    os.environ["PYTHONSAFEPATH"] = "1"


@app.command()
def init(
    federation: Annotated[
        Path, typer.Argument(help="Participants, server and experiment.", metavar="FEDERATION.yaml")
    ] = Path("federation.yaml"),
    out: Annotated[Path | None, typer.Option(help="Folder for the kits; default: the federation's name.")] = None,
    example: Annotated[bool, typer.Option("--example", help="Write a commented example of this file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a kit for the server and for every site.

    Run it again after adding a site to the file; existing kits are not changed.
    """
    from panorgan.cli.federation_init import make_all, write_example

    if example:
        write_example(federation, as_json)
    else:
        make_all(federation, out, as_json)


@app.command()
def preflight(
    kit: KitPath = _HERE,
    no_data: Annotated[bool, typer.Option("--no-data", help="Skip reading the scans.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check network, certificates, disk and data before a participant starts; changes nothing.

    Exit code: 0 if nothing failed, 2 otherwise.
    """
    found = find_kit(kit)
    load("panorgan.cli.federation_run")
    from panorgan.cli.federation_run import check_before_start

    raise typer.Exit(FAILED if check_before_start(found, not no_data, as_json) else 0)


@app.command()
def server(kit: KitPath = _HERE) -> None:
    """Run the server that the sites connect to (coordinator). Ctrl-C stops it."""
    found = server_kit(kit, "server")
    load("panorgan.cli.foreground")
    from panorgan.cli.foreground import run_in_foreground

    raise typer.Exit(run_in_foreground(found))


@app.command()
def site(kit: KitPath = _HERE) -> None:
    """Take part with this hospital's data. Only connects out. Ctrl-C stops it."""
    found = site_kit(kit, "site")
    load("panorgan.cli.foreground")
    from panorgan.cli.foreground import run_in_foreground

    raise typer.Exit(run_in_foreground(found))


@app.command()
def start(kit: KitPath = _HERE, as_json: AsJson = False) -> None:
    """Start or continue the run, and follow it (coordinator).

    Survives failing sites and server restarts. May itself be stopped and started again at any time.
    """
    found = server_kit(kit, "start")
    load("panorgan.cli.federation_run")
    from panorgan.cli.federation_run import start_and_watch

    start_and_watch(found, as_json)


@app.command()
def status(
    kit: KitPath = _HERE,
    watch: Annotated[bool, typer.Option("--watch", help="Keep updating until the run ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of the run: stage, round, sites, refusals, time left.

    Exit code: 0; 1 if the run has failed, or was interrupted and has no driver.
    """
    found = server_kit(kit, "status")
    load("panorgan.cli.federation_run")
    from panorgan.cli.federation_run import show_status

    state = show_status(found, watch, as_json)
    raise typer.Exit(TROUBLED if state in ("failed", "interrupted", "silent") else 0)


@app.command()
def watch(
    kit: KitPath = _HERE,
    port: Annotated[int, typer.Option(help="Port of the page on this machine; 0 chooses a free one.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
    opened: Annotated[bool, typer.Option("--open", help="The old way to open a browser.", hidden=True)] = False,
    as_json: AsJson = False,
) -> None:
    """Follow the run in the browser: missing sites, losses, Dice, refusals (coordinator)."""
    found = server_kit(kit, "watch")
    from panorgan.cli.watch import serve
    from panorgan.viewer.live_status import DrivenRun

    serve(DrivenRun(found), port, opened or not no_browser, as_json)


@app.command()
def stop(
    kit: KitPath = _HERE,
    now: Annotated[bool, typer.Option("--now", help="Stop at once, without finishing the current round.")] = False,
    as_json: AsJson = False,
) -> None:
    """At the server: stop the run after the current round; `start` continues it, and nothing is lost.

    At a site: stop taking part at once.
    """
    from panorgan.deployment.folders import SiteKit

    if isinstance(found := find_kit(kit), SiteKit):
        stop_site(found, as_json)
        return
    from panorgan.deployment.drive import request_stop

    ended = request_stop(found, now)
    when = "now" if now else "after the current round"
    if as_json:
        print(json.dumps({"stop": None, "state": ended} if ended else {"stop": when}), flush=True)
        return
    if ended:
        say(f"The run is {ended}: there is nothing to stop.")
        return
    say(f"The run will stop {when}. Continue with: panorgan federation start {found.path}")


def stop_site(kit: SiteKit, as_json: bool) -> None:
    """Stop the site's process on this machine."""
    from panorgan.deployment.processes import stop_process

    stopped = stop_process(kit)
    words = "The site has stopped." if stopped else "Nothing runs from this kit on this machine."
    print(json.dumps({"stopped": stopped}) if as_json else words, flush=True)


@app.command()
def score(kit: KitPath = _HERE, as_json: AsJson = False) -> None:
    """Score the delivered model on this site's own test cases; the scores stay here."""
    found = site_kit(kit, "score")
    load("panorgan.cli.federation_run")
    from panorgan.cli.federation_run import score_and_show

    score_and_show(found, as_json)


app.command()(approve)
app.command()(egress)
app.command()(revoke)
app.command()(renew)


# -- which kit -----------------------------------------------------------------------------------------------------


def find_kit(path: Path) -> ServerKit | SiteKit:
    """The kit in a folder, of either kind. Found before anything slow is imported: a wrong path shows at once."""
    from panorgan.deployment.folders import ServerKit, SiteKit

    # Absolute, so that a suggested command such as `panorgan federation start KIT` works from any folder.
    place = path.expanduser().resolve()
    for kind in (ServerKit, SiteKit):
        if (found := kind(place)).settings.is_file():
            return found
    near = (place / "server", *sorted(place.glob("sites/*")), *sorted(place.glob("*")))
    inside = [kit for kit in dict.fromkeys(near) if any(kind(kit).settings.is_file() for kind in (ServerKit, SiteKit))]
    raise ConfigError(
        "This folder is not a kit." if place.is_dir() else "There is no such folder.",
        code="not-a-kit" if place.is_dir() else "kit-missing",
        where=str(place),
        why="a kit has local/coordinator.yaml (server) or local/site.yaml (site)" if place.is_dir() else "",
        fix=f"It holds kits; give one of them: {', '.join(str(kit) for kit in inside)}."
        if inside
        else "Give the folder of the kit, or make kits with 'panorgan federation init'.",
    )


def server_kit(path: Path, command: str) -> ServerKit:
    """The server's kit in a folder; a site's is refused."""
    from panorgan.deployment.folders import ServerKit

    if not isinstance(kit := find_kit(path), ServerKit):
        raise ConfigError(
            "This is a site's kit.",
            code="is-site-kit",
            where=str(kit.path),
            why=f"'{command}' is for the coordinator's machine",
            fix="Give the server's kit. At a site, use 'approve', 'preflight', 'site' and 'stop'; 'egress' shows what "
            "has left, site.log in the kit what happens.",
        )
    return kit


def site_kit(path: Path, command: str) -> SiteKit:
    """A site's kit in a folder; the server's is refused."""
    from panorgan.deployment.folders import SiteKit

    if not isinstance(kit := find_kit(path), SiteKit):
        raise ConfigError(
            "This is the server's kit.",
            code="is-server-kit",
            where=str(kit.path),
            why=f"'{command}' is for a hospital's machine",
            fix="Give a site's kit. At the server, use 'preflight', 'server', 'start', 'status' and 'stop'.",
        )
    return kit
