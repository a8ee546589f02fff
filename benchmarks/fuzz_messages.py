"""Mutated messages by the million: does every reader give a sound message or refuse it?

    python benchmarks/fuzz_messages.py --messages 1000000 --seed 1 [--files 0.02] [--out fuzz.json]

Any other outcome is a fault: it is written to the folder `--faults`, one file per message, and the exit code is 1. The
tests try 100,000 with fixed seeds; this takes as many as one likes. `--files` is the share that is also read from disk.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "helpers")]

from fuzzing import SOUND, examine, examine_file  # noqa: E402
from mutations import Mutator  # noqa: E402


def fuzz(messages: int, seed: int, files: float, faults: Path) -> dict[str, object]:
    """Try so many messages; what became of them, in numbers."""
    mutator, chosen = Mutator(SOUND, seed), random.Random(seed)
    taken, on_disk, found = 0, 0, Counter[str]()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(messages):
            content = mutator.message()
            try:
                taken += examine(content)
                if chosen.random() < files:
                    on_disk += 1
                    examine_file(content, Path(scratch) / "message.safetensors")
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a panic of the Rust library is no Exception
                found[type(error).__name__] += 1
                faults.mkdir(parents=True, exist_ok=True)
                (faults / f"seed-{seed}-{number}.safetensors").write_bytes(content)
    return {
        "messages": messages,
        "seed": seed,
        "taken": taken,
        "read_from_disk": on_disk,
        "faults": dict(found),
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", type=float, default=0.02)
    parser.add_argument("--faults", type=Path, default=Path("fuzz-faults"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = fuzz(arguments.messages, arguments.seed, arguments.files, arguments.faults)
    text = json.dumps(result, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
