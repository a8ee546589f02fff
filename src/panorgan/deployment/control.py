"""How `start`, `stop` and `status` communicate with the segment that runs: small files in the run folder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panorgan.checksums import read_json as parse_json
from panorgan.checksums import sealed_json
from panorgan.federation.events import Event
from panorgan.federation.files import write_atomically


@dataclass(frozen=True)
class Control:
    """The `control/` folder of a run. Every file is replaced as a whole, so a reader never sees a partial one."""

    folder: Path

    @property
    def job(self) -> Path:
        """The current activity of the running job."""
        return self.folder / "job.json"

    @property
    def driver(self) -> Path:
        """The current activity of the driver."""
        return self.folder / "driver.json"

    @property
    def outcome(self) -> Path:
        """How the last segment ended, according to the job itself."""
        return self.folder / "outcome.json"

    @property
    def finished(self) -> Path:
        """Exists once the run is done and the model delivered."""
        return self.folder / "finished.json"

    @property
    def delivered(self) -> Path:
        """Which sites have the final model."""
        return self.folder / "delivered.json"

    # -- requests ------------------------------------------------------------------------------------------

    @property
    def _stop(self) -> Path:
        return self.folder / "stop"

    @property
    def _gone(self) -> Path:
        return self.folder / "gone.json"

    @property
    def _end_segment(self) -> Path:
        return self.folder / "end-segment"

    def request_stop(self) -> None:
        """Ask for an end after the current round."""
        write_atomically(self._stop, "")

    def stop_requested(self) -> bool:
        """Whether the user asked for an end."""
        return self._stop.exists()

    def forget_stop(self) -> None:
        """Withdraw an earlier request to stop, at a new start."""
        self._stop.unlink(missing_ok=True)

    def request_segment_end(self) -> None:
        """Ask the job to end after the current round: a site waits to join."""
        write_atomically(self._end_segment, "")

    def should_end(self) -> bool:
        """Whether the job should do no further round."""
        return self._stop.exists() or self._end_segment.exists()

    def say_gone(self, job: str, sites: set[str]) -> None:
        """Tell a job which sites will not answer it any more."""
        write_atomically(self._gone, sealed_json({"job": job, "sites": sorted(sites)}))

    def gone(self, job: str) -> set[str]:
        """Sites that will not answer this job any more."""
        known = read_json(self._gone)
        return set(known["sites"]) if known.get("job") == job else set()

    def begin_segment(self) -> None:
        """Remove what was written for an earlier job."""
        for path in (self._gone, self._end_segment, self.outcome):
            path.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """A small file's content; empty where it is missing, unreadable or damaged."""
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class JobNews:
    """Listens to the coordinator and keeps `job.json` current."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._question: tuple[str, int | None] | None = None
        self._news: dict[str, Any] = {"asked": [], "answered": {}}

    def __call__(self, event: Event) -> None:
        facts = event.facts
        if event.kind == "round_started":
            self._news |= {"round": facts["number"], "total": facts["total"], "stage": facts["stage"]}
        elif event.kind == "asked":
            question = (facts["task"], facts.get("number"))
            if question != self._question:  # else: failed sites are asked again; the others have answered
                self._question = question
                self._news |= {"kind": facts["task"], "asked": facts["sites"], "answered": {}, "since": event.time}
        elif event.kind == "answered":
            self._news["answered"][facts["site"]] = facts["seconds"]
        else:
            return
        write_atomically(self._path, sealed_json({**self._news, "updated": time.time()}))
