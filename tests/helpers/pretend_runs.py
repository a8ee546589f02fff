"""Run folders that look begun or finished, without the training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from panorgan.federation.events import Listener
from panorgan.workflows.compare import Planned


def finish(run: Planned, **facts: Any) -> None:
    """Make a folder look like a finished run; `facts` stand in its manifest besides the usual."""
    run.folder.path.mkdir(parents=True)
    usual = {"experiment": run.experiment.as_json(), "test_fingerprint": "same", "run": run.title}
    run.folder.manifest_file.write_text(json.dumps({**usual, **facts}))
    run.folder.scores_file.write_text("split,site,case,organ,dice\n")


def begin(run: Planned, threads: int) -> None:
    """Make a folder look like a run that was begun with so many threads."""
    finish(run, hardware={"threads": threads})
    run.folder.scores_file.unlink()


@contextmanager
def unwatched(run: Planned, number: int, total: int) -> Iterator[Listener]:
    """Ignore progress."""
    yield lambda event: None
