"""`kill -9` at any moment, then resume: the final weights are bit-identical to the uninterrupted run."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from dying_run import train_and_die

from panorgan.config import parse_experiment
from panorgan.workflows.execute import train

# Children start from a clean server process that has the heavy imports done: quick, and safe with OpenMP.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["dying_run"])

CHANGES = {"training": {"rounds": 4, "validate_every": 2, "optimizer": {"learning_rate": 0.01, "keep_state": True}}}

KILL_POINTS = {
    # function to interrupt, which call of it, whether it still does its work before the kill
    "before anything is written": ("panorgan.federation.files.os.replace", 0, False),
    "joined, before the first checkpoint": ("panorgan.federation.checkpoint.write_atomically", 0, False),
    "in the middle of a site's steps": ("panorgan.methods.base.SiteRule.step", 5, True),
    "after one site's answer was spooled": ("panorgan.federation.collector.check_answer", 0, True),
    "site state written, answer not yet received": ("panorgan.federation.local_state.LocalState.save", 2, True),
    "site answer written, its state not": ("panorgan.federation.local_state.write_atomically", 3, False),
    "during aggregation": ("panorgan.federation.aggregation.SpooledUpdates.mean", 1, False),
    "a site has begun to remember the run": ("panorgan.federation.run_record.write_atomically", 0, True),
    "scored, but not yet remembered": ("panorgan.federation.run_record.write_atomically", 2, False),
    "during validation": ("panorgan.federation.site.SiteWorker._evaluate", 1, True),
    "halfway through writing a checkpoint": ("halfway", 2, False),
    "best linked, checkpoint not": ("panorgan.federation.checkpoint._link_atomically", 0, False),
    "after a checkpoint, before its event": ("panorgan.federation.coordinator.shutil.rmtree", 1, False),
    "while the model is delivered": ("panorgan.workflows.model_bundle.write_atomically", 0, True),
    "while test cases are scored": ("panorgan.workflows.scoring.score_case", 1, True),
    "before metrics.csv is in place": ("panorgan.workflows.execute.write_metrics", 0, False),
}


def outcome(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "model" / "model.safetensors").read_bytes(), (folder / "metrics.csv").read_bytes()


@pytest.fixture(scope="module")
def content(tiny_content) -> dict[str, Any]:
    return tiny_content(**CHANGES)


@pytest.fixture(scope="module")
def undisturbed(content, cache, tmp_path_factory) -> tuple[bytes, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(parse_experiment(content), folder, cache=cache)
    return outcome(folder)


@pytest.mark.slow
@pytest.mark.parametrize("point", KILL_POINTS.values(), ids=KILL_POINTS.keys())
def test_killed_at_a_chosen_point_then_resumed(point, content, cache, undisturbed, tmp_path):
    folder = tmp_path / "run"
    child = CONTEXT.Process(target=train_and_die, args=(content, folder, cache, point))
    child.start()
    child.join(timeout=400)
    assert child.exitcode == -signal.SIGKILL, "the kill point was never reached"
    train(parse_experiment(content), folder, resume=True, cache=cache)
    assert outcome(folder) == undisturbed
    assert not list(folder.rglob(".*.incomplete")), "scratch files are left"


@pytest.mark.slow
def test_killed_from_outside_again_and_again(content, cache, undisturbed, tmp_path):
    """The real command, killed at arbitrary moments, resumed until it is done."""
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "panorgan", "train", str(path), "--run", str(folder), "--resume", "--json"]
    environment = {**os.environ, "PANORGAN_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    killed = 0
    for attempt in range(6):
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        # wait until it has begun to work, then a little longer each time
        seen = 0
        for line in child.stdout:
            seen += json.loads(line).get("event") in ("round_started", "round", "score")
            if attempt < 3 and seen > 2 * attempt:
                time.sleep(0.03 * attempt)
                child.kill()
                break
        child.wait(timeout=120)
        killed += child.returncode == -signal.SIGKILL
        if child.returncode == 0:
            break
    assert killed == 3
    assert outcome(folder) == undisturbed
