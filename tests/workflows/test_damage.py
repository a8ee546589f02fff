"""One changed byte in any file that panorgan wrote: the same result, or an error; never another result in silence."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from damaging import (
    Kind,
    cache_kinds,
    files_of_run,
    make_finished,
    make_unfinished,
    network_kinds,
    resume_damaged,
    run_kinds,
    silent_change,
    stop_in_round,
    unfinished_kinds,
)

from panorgan.data import file_hashes
from panorgan.errors import RunError
from panorgan.federation.events import DAMAGED, Event, EventLog
from panorgan.report.page import describe_happening
from panorgan.workflows.compare_costs import _Rounds
from panorgan.workflows.execute import train
from panorgan.workflows.run import Run

DRAWS = 200
KEEP = {"optimizer": {"learning_rate": 0.01, "keep_state": True}, "validate_every": 1, "local_steps": 1}
FLKD = {"name": "flkd", "pretrain": 0.3}


@pytest.fixture(scope="module")
def own_cache(cache, tiny, tmp_path_factory) -> Path:
    """A copy that may be damaged; others use the session's."""
    from panorgan.workflows.prepare import prepare

    prepare(tiny(), cache)
    folder = tmp_path_factory.mktemp("damaged cache") / "cache"
    shutil.copytree(cache, folder)
    return folder


@pytest.fixture(scope="module")
def kinds(tiny, own_cache, tmp_path_factory) -> Iterator[list[Kind]]:
    folder = tmp_path_factory.mktemp("damage")
    make_finished(tiny(training={**KEEP, "rounds": 2}, local_models=True), folder / "finished", own_cache)
    make_unfinished(tiny(method=FLKD, training={**KEEP, "rounds": 3}), folder / "unfinished", own_cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_hashes, "_SETTLED_SECONDS", -1.0)
        yield [
            *run_kinds(folder / "finished"),
            *unfinished_kinds(folder / "unfinished"),
            *cache_kinds(tiny(), own_cache, folder / "made"),
            *network_kinds(folder / "network"),
        ]


@pytest.mark.slow
def test_no_changed_byte_changes_what_is_read_in_silence(kinds):
    assert all(kind.files for kind in kinds), [kind.name for kind in kinds if not kind.files]
    draw = random.Random(0)
    silent = [silent_change(kinds[number % len(kinds)], draw) for number in range(DRAWS)]
    assert not any(silent), "\n".join(filter(None, silent))


@pytest.mark.slow
def test_a_resumed_run_ends_in_the_same_bits_or_with_an_error(tiny, own_cache, tmp_path):
    """Whole runs: one byte of each file of a run that was stopped in its last round is changed, then it is resumed."""
    experiment = tiny(training={**KEEP, "rounds": 3})
    train(experiment, tmp_path / "undisturbed", cache=own_cache)
    with stop_in_round(3):
        train(experiment, tmp_path / "stopped", cache=own_cache)
    draw, ends = random.Random(1), []
    for number, file in enumerate(files_of_run(tmp_path / "stopped")):
        folder = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "stopped", folder)
        end, what = resume_damaged(experiment, folder, file, tmp_path / "undisturbed", own_cache, draw)
        assert end != "silent", what
        ends.append(end)
    assert set(ends) == {"same", "error"}, ends


def test_a_report_names_a_damaged_line():
    assert "Line 7" in describe_happening(Event(DAMAGED, {"line": 7}, 0.0))[1]


def test_a_comparison_refuses_costs_from_a_damaged_log(tmp_path):
    run = Run(tmp_path)
    EventLog(run.events_file).record("round", number=1)
    run.events_file.write_text(run.events_file.read_text().replace('"number": 1', '"number": 3'))
    with pytest.raises(RunError) as caught:
        _Rounds.read(run)
    assert caught.value.code == "log-damaged"
    assert "line 1" in caught.value.where
