"""Kill -9 of sites, their jobs, the server, its job and the driver, at random moments, over one run.

Asks: does the run finish by itself, is every round there once, and are the final weights those of the same run without
a single kill, bit for bit? Server and three sites are processes of their own on loopback, from provisioned kits, with
mutual TLS. What is killed is started again after a moment, as a service manager does. The method is the tests'
`everything`: a pretrain stage, keys that differ by site, bit-packed masks, float16, private and server state.

    python benchmarks/chaos.py --kills 20 --out benchmarks/results/chaos.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "helpers" / "plugin")]

import everything_method  # noqa: F401, E402  (registers the method)
import torch  # noqa: E402
from loopback import Loopback  # noqa: E402
from random_kills import Chaos  # noqa: E402

import panorgan  # noqa: E402
from panorgan.config import Experiment, parse_experiment  # noqa: E402
from panorgan.federation.audit import verify  # noqa: E402
from panorgan.federation.checkpoint import Checkpoints  # noqa: E402
from panorgan.federation.events import read_events  # noqa: E402
from panorgan.workflows.execute import train  # noqa: E402
from panorgan.workflows.manifest import git_hash  # noqa: E402
from panorgan.workflows.site_cases import site_settings  # noqa: E402

SITES = [
    {"name": "east", "annotated": ["spleen"], "cases": 4, "spacing_mm": [12, 12, 12]},
    {"name": "north", "annotated": ["liver"], "cases": 5, "spacing_mm": [12, 12, 12]},
    {"name": "south", "annotated": ["kidney"], "cases": 4, "spacing_mm": [11, 11, 13]},
]


def experiment_in(cache: Path, rounds: int) -> Experiment:
    """Three small hospitals, and rounds of a few seconds."""
    shared = {
        "name": "chaos",
        "vocabulary": ["liver", "spleen", "kidney_left", "kidney_right"],
        "method": {"name": "everything"},
        "network": {"features": [4, 8, 8]},
        "hardware": {"device": "cpu", "threads": 1},
        "training": {
            "rounds": rounds,
            "local_steps": 40,
            "validate_every": 2,
            "overlap": 0.0,
            "sampling": {"patch_size": [16, 16, 16], "batch_size": 2},
            "optimizer": {"learning_rate": 0.01, "keep_state": True},
        },
    }
    generated = parse_experiment({**shared, "phantom": {"field_of_view_mm": [364, 320, 220], "sites": SITES}})
    sites = site_settings(generated, cache, lambda what, done, total: None)
    plain = {name: site.model_copy(update={"withheld": None}).as_json() for name, site in sites.items()}
    return parse_experiment({**shared, "sites": plain})


def measure(folder: Path, kills: int, rounds: int, seed: int, timeout: float) -> dict[str, object]:
    """One undisturbed run in this process, one with kills between processes."""
    experiment = experiment_in(folder / "cache", rounds)
    undisturbed = Checkpoints(train(experiment, folder / "undisturbed").path / "checkpoints").load_latest()
    assert undisturbed is not None
    began = time.monotonic()
    with Loopback(folder / "federation", experiment, experiment.sites, per_segment=5, on_missing="wait") as federation:
        run = federation.server_kit.path / "run"
        federation.start("driver")
        # Jobs take a while to start: with pauses like these, kills meet rounds as well as starts.
        chaos = Chaos(federation, seed, pause=(5.0, 30.0))
        chaos.wait_for(run / "checkpoints", timeout)
        finished = chaos.run(run / "control" / "finished.json", kills, timeout)
    survived = Checkpoints(run / "checkpoints").load_latest()
    events = list(read_events(run / "events.jsonl"))
    numbers = [event.facts["number"] for event in events if event.kind == "round"]
    same = survived is not None and all(
        torch.equal(survived.weights[key], value) for key, value in undisturbed.weights.items()
    )
    return {
        "finished": finished,
        "kills": len(chaos.kills),
        "killed": dict(Counter(kind for _, kind, _ in chaos.kills)),
        "rounds": undisturbed.rounds_done,
        "every_round_once_in_the_log": numbers == list(range(1, undisturbed.rounds_done + 1)),
        "bit_identical": bool(finished and same and survived is not None and survived.best == undisturbed.best),
        "segments": sum(event.kind in ("started", "resumed") for event in events),
        "audit_logs_verify": all(verify(kit.audit_log).ok for kit in federation.site_kits.values()),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "when": chaos.kills,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30.0, help="give up after so long")
    parser.add_argument("--out", type=Path, help="write the result here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(
            Path(scratch), arguments.kills, arguments.rounds, arguments.seed, timeout=arguments.minutes * 60
        )
    manifest = {
        "command": "python benchmarks/chaos.py " + " ".join(sys.argv[1:]),
        "panorgan": panorgan.__version__,
        "commit": git_hash(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    text = json.dumps({"manifest": manifest, **result}, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)
    sys.exit(0 if result["bit_identical"] else 1)


if __name__ == "__main__":
    main()
