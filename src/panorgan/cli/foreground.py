"""`panorgan federation server` and `site`: run until Ctrl-C, with a few plain lines. Light: it runs for weeks."""

from __future__ import annotations

from panorgan.cli.follow import follow_logs, say_with_time
from panorgan.deployment.certificate_checks import start_warnings
from panorgan.deployment.data_folder import data_folder_warnings
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.deployment.processes import run_server, run_site


def run_in_foreground(kit: ServerKit | SiteKit) -> int:
    """Run the server or the site of a kit until Ctrl-C; returns the exit code."""
    what = "server" if isinstance(kit, ServerKit) else "site"
    say_with_time(f"{what} {kit.path} starts; Ctrl-C stops it")
    for words in (*start_warnings(kit), *(data_folder_warnings(kit) if isinstance(kit, SiteKit) else ())):
        say_with_time(words)
    with follow_logs(kit, say_with_time):
        code = run_server(kit, say_with_time) if isinstance(kit, ServerKit) else run_site(kit, say_with_time)
    say_with_time("stopped" if code == 0 else f"ended with code {code}; engine.out and log.txt say more")
    return code
