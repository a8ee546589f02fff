"""Change single bytes of every kind of file that panorgan writes, and read it again: is a change ever silent?

    python benchmarks/damage.py [--draws 5000] [--runs 20] [--seed 0]

`--draws` reads single files as panorgan does, `--runs` resumes whole runs (some seconds each) in which one byte of one
file was changed. Each must give the same bits as before, or an error that says what to do. Prints one JSON object;
the exit code is 1 if there was a silent change.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "helpers")]

import torch  # noqa: E402
from damaging import (  # noqa: E402
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

from panorgan.config import Experiment, parse_experiment  # noqa: E402
from panorgan.data import file_hashes  # noqa: E402
from panorgan.workflows.execute import train  # noqa: E402


def experiment(method: str, rounds: int, **more: Any) -> Experiment:
    """Two tiny hospitals whose sites keep a state."""
    return parse_experiment(
        {
            "name": "damage",
            "vocabulary": ["liver", "spleen"],
            "method": {"name": method},
            "network": {"features": [4, 8]},
            "hardware": {"device": "cpu", "threads": 1},
            "plan": {"spacing_mm": [16, 16, 16], "window_hu": [-160, 240]},
            "phantom": {
                "field_of_view_mm": [364, 320, 220],
                "sites": [
                    {"name": "north", "annotated": ["liver"], "cases": 4, "spacing_mm": [16, 16, 16]},
                    {"name": "south", "annotated": ["spleen"], "cases": 4, "spacing_mm": [16, 16, 16]},
                ],
            },
            "training": {
                "rounds": rounds,
                "local_steps": 1,
                "validate_every": 1,
                "overlap": 0.0,
                "sampling": {"patch_size": [16, 16, 8], "batch_size": 1},
                "optimizer": {"learning_rate": 0.01, "keep_state": True},
            },
            **more,
        }
    )


def read_draws(kinds: list[Kind], draws: int, draw: random.Random) -> dict[str, Any]:
    """Single files, each kind in turn."""
    silent = [silent_change(kinds[number % len(kinds)], draw) for number in range(draws)]
    return {"draws": draws, "kinds": [kind.name for kind in kinds], "silent": [what for what in silent if what]}


def run_draws(folder: Path, cache: Path, runs: int, draw: random.Random) -> dict[str, Any]:
    """Whole runs that were stopped before their last round."""
    asked = experiment("fedavg", 3)
    train(asked, folder / "undisturbed", cache=cache)
    with stop_in_round(3):
        train(asked, folder / "stopped", cache=cache)
    ends: Counter[str] = Counter()
    silent = []
    for number in range(runs):
        copy = folder / f"{number}"
        shutil.copytree(folder / "stopped", copy)
        file = draw.choice(files_of_run(copy))
        end, what = resume_damaged(asked, copy, file, folder / "undisturbed", cache, draw)
        ends[end] += 1
        silent += [what] if end == "silent" else []
        shutil.rmtree(copy)
    return {"runs": runs, "ends": dict(ends), "silent": silent}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    file_hashes._SETTLED_SECONDS = -1.0  # hashes of new files are remembered at once
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder, cache = Path(scratch), Path(scratch) / "cache"
        make_finished(experiment("fedavg", 2, local_models=True), folder / "finished", cache)
        make_unfinished(experiment("flkd", 3), folder / "unfinished", cache)
        kinds = [
            *run_kinds(folder / "finished"),
            *unfinished_kinds(folder / "unfinished"),
            *cache_kinds(experiment("fedavg", 2), cache, folder / "made"),
            *network_kinds(folder / "network"),
        ]
        files = read_draws(kinds, arguments.draws, draw)
        runs = run_draws(folder / "runs", cache, arguments.runs, draw)
    print(json.dumps({"files": files, "runs": runs}))
    return 1 if files["silent"] or runs["silent"] else 0


if __name__ == "__main__":
    sys.exit(main())
