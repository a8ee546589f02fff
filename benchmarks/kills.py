"""Kill -9 of `panorgan train` at random moments, over five methods: does every run end in the same bits?

Each method trains a tiny phantom federation once without a kill and once with them; what is killed is started again
with `--resume`, until it finishes. Delivered model and scores must be the same, byte for byte.

    python benchmarks/kills.py --kills 8 --out benchmarks/results/kills.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

METHODS = ("fedavg", "scaffold", "flkd", "ufps", "fediod")
FILES = ("model/model.safetensors", "metrics.csv")
EXPERIMENT: dict[str, Any] = {
    "name": "kills",
    "vocabulary": ["liver", "spleen", "kidney_left", "kidney_right"],
    "phantom": {
        "sites": [
            {"name": "north", "annotated": ["liver"], "cases": 5, "spacing_mm": [12, 12, 12]},
            {"name": "south", "annotated": ["spleen", "kidney"], "cases": 4, "spacing_mm": [11, 11, 13]},
        ]
    },
    "plan": {"spacing_mm": [12, 12, 12], "intensity": "window", "window_hu": [-160, 240]},
    "splits": {"balanced": True},
    "network": {"features": [4, 8, 8], "organ_prior": None},
    "hardware": {"device": "cpu", "threads": 1},
    "training": {
        "rounds": 12,
        "local_steps": 6,
        "validate_every": 3,
        "overlap": 0.0,
        "sampling": {"patch_size": [16, 16, 16], "batch_size": 2},
        "optimizer": {"learning_rate": 0.01},
    },
}
EXTRA = {"fediod": {"layers": 2, "heads": 2, "head_width": 8, "mlp_width": 16, "refresh_every": 2}}


def main() -> None:
    """Run, kill, compare, write down."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--kills", type=int, default=8, help="of every method's run")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--out", type=Path)
    asked = arguments.parse_args()
    draw = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        rows = [_compare(Path(folder), method, asked.kills, draw) for method in METHODS]
    result = {"kills": sum(row["kills"] for row in rows), "same": all(row["same"] for row in rows), "methods": rows}
    print(json.dumps(result, indent=1))
    if asked.out:
        about = (
            "kill -9 of panorgan train at random moments, resumed until it ends; delivered model and scores compared"
        )
        asked.out.write_text(json.dumps({"about": about, **result}, indent=1) + "\n")
    sys.exit(0 if result["same"] else 1)


def _compare(folder: Path, method: str, kills: int, draw: random.Random) -> dict[str, Any]:
    """One method with and without kills."""
    file = folder / f"{method}.yaml"
    file.write_text(yaml.safe_dump({**EXPERIMENT, "method": {"name": method, **EXTRA.get(method, {})}}))
    _time_of_first_round(file, folder / f"{method}-first", folder)  # fills the cache: what follows takes its usual time
    ready, whole = _time_of_first_round(file, folder / f"{method}-whole", folder)
    done, runs, same = 0, 0, True
    while done < kills and same:  # a run that survived its kills makes room for the next
        runs += 1
        run = folder / f"{method}-killed-{runs}"
        killed, code = _run_with_kills(file, run, folder, kills - done, (ready, ready + (whole - ready) / 3), draw)
        done += killed
        same = code == 0 and all((folder / f"{method}-whole" / n).read_bytes() == (run / n).read_bytes() for n in FILES)
    return {"method": method, "runs": runs, "kills": done, "same": same}


def _time_of_first_round(file: Path, run: Path, folder: Path) -> tuple[float, float]:
    """Seconds until an undisturbed run has finished its first round, and until it has ended."""
    began, ready = time.monotonic(), 0.0
    process = _start(file, run, folder)
    while process.poll() is None:
        events = run / "events.jsonl"
        if not ready and events.exists() and b'"round"' in events.read_bytes():
            ready = time.monotonic() - began
        time.sleep(0.05)
    if process.returncode != 0:
        raise SystemExit(f"{file.stem} failed without a kill")
    return ready, time.monotonic() - began


def _run_with_kills(
    file: Path, run: Path, folder: Path, most: int, when: tuple[float, float], draw: random.Random
) -> tuple[int, int]:
    """How often a run was killed before it ended, and its exit code. Each kill comes while rounds are trained."""
    killed = 0
    while True:
        process = _start(file, run, folder)
        try:
            return killed, process.wait(draw.uniform(*when) if killed < most else 600)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1


def _start(file: Path, run: Path, folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PANORGAN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "panorgan", "train", str(file), "--run", str(run), "--resume"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
