"""Plain lines for a server or a site in the foreground, taken from the logs that its processes write.

The logs hold far more. A line that a later version of the network engine words differently is not shown.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.printable import one_line

Say = Callable[[str], None]
Phrases = Mapping[re.Pattern[str], Callable[[re.Match[str]], str]]

_LOOK_SECONDS = 0.5
_TASKS = {"train": "training", "evaluate": "validation", "join": "introduction", "deliver": "final model"}


def _short(job: str) -> str:
    return job.split("-")[0]


_SITE_ENGINE: Phrases = {
    re.compile(r"Successfully registered client"): lambda m: "connected to the server",
    re.compile(r"re-challenge after"): lambda m: "waiting for the server",
    re.compile(r"cannot send to 'server': target_unreachable"): lambda m: (
        "the server could not be reached; this site keeps trying"
    ),
    # A server that was renewed drops the messages of running sites without an answer.
    re.compile(r"timeout on Request \S+ for \['heart_beat'\]"): lambda m: (
        "no longer connected: the server does not answer this site's heartbeats. If its certificate was renewed, "
        "restart this site once"
    ),
    re.compile(r"this machine's clock is (.*\S)"): lambda m: (
        f"this machine's clock is {m[1]}; set it, and let NTP keep it"
    ),
    re.compile(r"Launched job ([\w-]+)"): lambda m: f"a segment starts (job {_short(m[1])})",
    re.compile(r"child worker process finished with RC 0\b"): lambda m: "the segment has ended",
    re.compile(r"child worker process finished with RC (-?[1-9]\d*)"): lambda m: (
        f"the segment's process ended with code {m[1]}; log.txt and site.log say more"
    ),
}
_SITE: Phrases = {
    re.compile(r"INFO asked: (\w+)/\w*/(\d+)"): lambda m: f"{_task(m)}: asked",
    re.compile(r"INFO answered: (\w+)/\w*/(\d+), (\d+) bytes"): lambda m: f"{_task(m)}: answered, {int(m[3]):,} bytes",
    re.compile(r"ERROR could not answer (\w+)/\w*/(\d+) \(([\w-]+)\)"): lambda m: (
        f"{_task(m)}: failed ({m[3]}); the reason is in site.log, and only the code was sent"
    ),
}
_SERVER_ENGINE: Phrases = {
    re.compile(r"added secure port at (\S+)"): lambda m: f"listening at {m[1]}",
    re.compile(r"New client ([\w-]+)@(\S+) joined"): lambda m: f"{m[1]} connected",
    re.compile(r"Started run: ([\w-]+) for clients: (\S+)"): lambda m: (
        f"a segment starts (job {_short(m[1])}) with {m[2].replace(',', ', ')}"
    ),
    re.compile(r"received from ([\w-]+): invalid auth token signature"): lambda m: (
        f"{m[1]} is refused: it was connected before this server's certificate was renewed. Restart that site once"
    ),
    re.compile(r"Client Name:\s*([\w-]+) left"): lambda m: f"{m[1]} left",
    re.compile(r"Remove the dead Client\. Name: ([\w-]+)"): lambda m: f"{m[1]} is silent and counts as gone",
}
_TURNED_AWAY: Phrases = {
    # Without the port: repeated attempts from one address are reported once.
    re.compile(r" turned away (\S+?)(:\d+)?: (.*)"): lambda m: f"turned away {m[1]}: {m[3]}",
}


def _task(found: re.Match[str]) -> str:
    word = _TASKS.get(found[1], found[1])
    return word if found[1] in ("join", "deliver") else f"round {found[2]}, {word}"


@contextmanager
def follow_logs(kit: ServerKit | SiteKit, say: Say) -> Iterator[None]:
    """While this context is open, relevant log lines are shown; repeated ones once."""
    logs: dict[Path, Phrases]
    if isinstance(kit, SiteKit):
        logs = {kit.path / "log.txt": _SITE_ENGINE, kit.log: _SITE}
    else:
        logs = {kit.path / "log.txt": _SERVER_ENGINE, kit.turned_away: _TURNED_AWAY}
    tails = [(LogTail(path), phrases) for path, phrases in logs.items()]
    ended = threading.Event()
    last = ""

    def look() -> None:
        nonlocal last
        for tail, phrases in tails:
            for line in tail.new():
                if (words := translate(line, phrases)) and words != last:
                    last = words
                    say(words)

    def watch() -> None:
        while not ended.wait(_LOOK_SECONDS):
            look()

    thread = threading.Thread(target=watch, daemon=True, name="log follower")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        look()


def translate(line: str, phrases: Phrases) -> str:
    """A log line in plain words; empty if it is not worth showing."""
    for pattern, words in phrases.items():
        if found := pattern.search(line):
            return words(found)
    return ""


class LogTail:
    """Lines appended to a file from now on; the file may not exist yet, or be rotated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = path.stat().st_size if path.is_file() else 0

    def new(self) -> Iterator[str]:
        """Whole lines since the last call."""
        try:
            if self._path.stat().st_size < self._place:
                self._place = 0  # rotated
            with self._path.open("rb") as file:
                file.seek(self._place)
                content = file.read()
        except OSError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._place += len(whole)
        yield from whole.decode(errors="replace").splitlines()


def say_with_time(words: str) -> None:
    """A line with the time in front, for a terminal or a journal."""
    print(f"{time.strftime('%H:%M:%S')}  {one_line(words)}", flush=True)  # without rich: this runs for weeks
