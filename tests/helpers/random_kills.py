"""Kill -9 whatever takes part in a federation, at random moments, and start it again as a service manager would."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from loopback import Loopback, descendants, kill_process

KINDS = ("site", "site's job", "server", "server's job", "driver")


@dataclass
class Chaos:
    """`kills` lists what was killed: seconds since the start, kind, name."""

    federation: Loopback
    seed: int = 0
    pause: tuple[float, float] = (2.0, 12.0)
    kills: list[tuple[float, str, str]] = field(default_factory=list)

    def wait_for(self, path: Path, timeout: float) -> bool:
        """Until something is there."""
        ends = time.monotonic() + timeout
        while not path.exists() and time.monotonic() < ends:
            self.federation.restart_dead()
            time.sleep(0.1)
        return path.exists()

    def run(self, finished: Path, at_least: int, timeout: float, kinds: tuple[str, ...] = KINDS) -> bool:
        """Kill until the run is finished and enough was killed; returns whether it finished in time."""
        draw, began, todo = random.Random(self.seed), time.monotonic(), list(kinds)
        next_kill = began + draw.uniform(*self.pause)
        while not finished.exists():
            now = time.monotonic()
            if now - began > timeout:
                return False
            self.federation.restart_dead()
            if now > next_kill and len(self.kills) < at_least:
                if not todo:
                    todo = list(kinds)
                kind = todo.pop(draw.randrange(len(todo)))
                name = self._kill(kind, draw)
                if name:
                    self.kills.append((round(now - began, 1), kind, name))
                next_kill = time.monotonic() + draw.uniform(*self.pause)
            time.sleep(0.2)
        return True

    def _kill(self, kind: str, draw: random.Random) -> str:
        """Kill one; the name of what was killed, empty if there was nothing of that kind just then."""
        sites = sorted(self.federation.site_kits)
        name = {"server": "server", "server's job": "server", "driver": "driver"}.get(kind) or draw.choice(sites)
        process = self.federation.processes.get(name)
        if process is None or process.poll() is not None:
            return ""
        if not kind.endswith("job"):
            # Only the process itself: whatever it started must notice by itself.
            process.kill()
            process.wait()
            return name
        jobs = [pid for pid in descendants(process.pid) if _is_job(pid)]
        if jobs:
            kill_process(jobs[0])
        return name if jobs else ""


def _is_job(process: int) -> bool:
    """Whether a process is one that NVFlare started for a job."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False
    return b"worker_process" in command or b"runner_process" in command
