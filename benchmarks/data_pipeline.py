"""How fast training patches come, and whether a GPU ever waits for them.

    python benchmarks/data_pipeline.py [--json] [--out FILE]                      patches per second on the CPU
    python benchmarks/data_pipeline.py --device cuda [--skip-cpu] [--json]        and the training loop on a GPU

`cpu`: patches per second from panorgan's store (foreground-biased sampling, augmentation, one mask per structure)
against the same steps made of MONAI dictionary transforms in a MONAI DataLoader: straight from the NIfTI files, with
`PersistentDataset` (prepared scans on disk) and with `CacheDataset` (prepared scans in memory). All of them run on the
same cores (pinned where the system allows it): panorgan in one process with a thread per core and one more that cuts
patches, MONAI with a worker process per core and one more that collects. In MONAI's favour, several patches come from
one visit of a scan, and its labels stay one integer map.

`cuda`: steps per second of the site's own loop on patches from the store (`real`), against the same steps on one batch
that already lies on the device (`constant`), and on that batch augmented anew in every step (`constant_augmented`).
`ratio` compares the steps after the first one of a round; `ratio_whole_round` counts taking over the received weights
and waiting for the first patches, too. `parts` times each piece of the data path alone.

Pipelines alternate within a run after one unmeasured block each. A rate is the median over blocks; a ratio is the
median over the ratios of neighbouring blocks. The data are phantoms, written to a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from data_pipeline_common import (
    AUGMENT,
    ORGANS,
    Shape,
    alternate,
    bytes_below,
    fill_store,
    paired_ratio,
    plan_for,
    usable_cores,
    write_phantoms,
)
from data_pipeline_loop import loop_part
from data_pipeline_monai import MonaiPipelines
from panorgan.preparation.augment import Draws, augment
from panorgan.preparation.prefetch import prefetched
from panorgan.preparation.sampling import PatchSampler, SamplingSettings


def cpu_part(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Patches per second of panorgan's store and of MONAI's transforms, in turn, on the same cores."""
    threads = arguments.threads
    cases = write_phantoms(folder / "nifti", arguments.scan_shape, arguments.cases, threads)
    plan = plan_for(arguments.stored_shape)
    stored, seconds = fill_store(cases, plan, folder / "store")
    sampling = SamplingSettings(patch_size=tuple(arguments.patch), batch_size=arguments.batch)
    monai = MonaiPipelines(cases, plan, sampling, AUGMENT, threads, folder / "persistent")
    visits = arguments.block * threads
    loaders = {
        "monai_nifti": monai.from_files(max(threads, visits // 4)),
        "monai_persistent": monai.persistent(visits),
        "monai_cache": monai.cached(visits),
    }
    sampler = PatchSampler(stored, ORGANS, sampling)
    blocks = {
        "panorgan_store": lambda: from_store(sampler, visits, background=threads > 1),
        **{name: (lambda loader=loader: _patches_per_second(loader)) for name, loader in loaders.items()},
    }
    rates = alternate(blocks, arguments.repeats)
    nifti = sum(path.stat().st_size for case in cases for path in (case.image, *case.labels.paths))
    persistent = bytes_below(folder / "persistent")
    count = len(cases)
    return {
        "threads": threads,
        "pinned_to_cores": hasattr(os, "sched_setaffinity"),
        "scan_shape": list(arguments.scan_shape),
        "stored_shape": list(stored[0].image.shape),
        "patch": list(arguments.patch),
        "patches_per_visit_of_a_scan_monai": arguments.batch,
        "patches_per_second": {name: statistics.median(values) for name, values in rates.items()},
        "blocks": rates,
        "ratio": {name: paired_ratio(rates["panorgan_store"], rates[name]) for name in loaders},
        "prepare_seconds_per_case": {
            "panorgan_store": seconds,
            "monai_persistent": monai.seconds["persistent"] / count,
            "monai_cache": monai.seconds["cached"] / count,
        },
        "bytes_per_case": {
            "nifti": nifti // count,
            "panorgan_store": bytes_below(folder / "store") // count,
            "monai_persistent": persistent // count,
            "monai_cache_in_memory": monai.memory_bytes // count,
        },
    }


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Keep this process and those it starts to so many cores."""
    before, threads = usable_cores(), torch.get_num_threads()
    torch.set_num_threads(count)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, before[:count])
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, before)


def from_store(sampler: PatchSampler, batches: int, background: bool) -> float:
    """Patches per second as the site gets them: sampled, augmented, one mask per structure."""
    draws = Draws(0)
    began = time.perf_counter()
    drawn = sampler.batches(batches, seed=0)
    for packed in prefetched(drawn) if background else drawn:
        augment(packed, AUGMENT, draws).unpack()
    return batches * sampler.settings.batch_size / (time.perf_counter() - began)


def _patches_per_second(loader: Any) -> float:
    """Patches per second of one pass of a MONAI loader."""
    began = time.perf_counter()
    patches = sum(len(batch["image"]) for batch in loader)
    return patches / (time.perf_counter() - began)


def manifest(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was run, with what."""
    given = sys.argv[1:]
    if arguments.out is not None:  # where the result lies says nothing about it
        given = [word for word in given if word != "--out" and word != str(arguments.out)]
    root = Path(__file__).resolve().parents[1]
    commit = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    versions = {}
    for package in ("monai", "numpy", "nibabel"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # put on the path without metadata
            versions[package] = "unknown"
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return {
        "command": shlex.join(["python", "benchmarks/data_pipeline.py", *given]),
        "commit": commit.stdout.strip() or None,
        "machine": f"{len(usable_cores())} CPU cores{gpu}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **versions,
    }


def _shape(text: str) -> Shape:
    x, y, z = (int(n) for n in text.split("x"))
    return x, y, z


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", action="store_true", help="last line is one JSON object")
    add("--out", type=Path, help="also write the result to this file")
    add("--cases", type=int, default=4, help="phantom scans")
    add("--repeats", type=int, default=5, help="measured blocks per pipeline")
    add("--skip-cpu", action="store_true", help="leave the comparison with MONAI out")
    add("--threads", type=int, default=len(usable_cores()), help="cores that each pipeline may use")
    add("--scan-shape", type=_shape, default=(256, 224, 96), help="voxels of the NIfTI files, such as 256x224x96")
    add("--stored-shape", type=_shape, default=(182, 160, 96), help="voxels after resampling")
    add("--patch", type=_shape, default=(96, 96, 64))
    add("--batch", type=int, default=4, help="patches per batch; MONAI's all come from one visit of a scan")
    add("--block", type=int, default=16, help="batches per core and block; straight from files a quarter of it")
    add("--device", help="run the training loop there: cuda (or cpu, to try it out)")
    add("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    add("--deterministic", action="store_true", help="cuDNN must give the same bits every time, at some cost in speed")
    add("--loop-scan-shape", type=_shape, default=(128, 112, 80))
    add("--loop-stored-shape", type=_shape, default=(182, 224, 208))
    add("--loop-patch", type=_shape, nargs="+", default=[(80, 192, 192), (96, 96, 96)])
    add("--loop-batch", type=int, default=2)
    add("--steps", type=int, default=40, help="steps per round, which is one block")
    add("--features", type=int, nargs="+", default=(32, 64, 128, 256, 320))
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_flush_denormal(True)
    result: dict[str, Any] = {"manifest": None, "cpu": None, "cuda": None}
    with tempfile.TemporaryDirectory() as scratch:
        if not arguments.skip_cpu:
            with on_cores(arguments.threads):
                result["cpu"] = cpu_part(arguments, Path(scratch) / "cpu")
        if arguments.device:
            result["cuda"] = loop_part(arguments, Path(scratch) / "loop")
    result["manifest"] = manifest(arguments)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
