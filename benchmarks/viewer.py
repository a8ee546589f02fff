"""How soon does the viewer show a large scan, and how much memory does its server take?

    python benchmarks/viewer.py [--shape 512,512,600] [--times 3]

Writes a generated CT of noise with labels (liver and spleen) as nnU-Net has them, opens it with `panorgan view` in a
headless Chromium without a graphics card, and tells the time from the address to the first picture, to the last one,
and the largest memory of the server's process. Needs Chromium, and Linux for the memory.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nibabel as nib
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from webgl import chromium_with_webgl

_SPACING = np.diag([0.75, 0.75, 1.0, 1.0])
_AIR, _WATER = -1000, 40
_READY = "document.body.dataset.state === 'ready' && document.body.dataset.volumes === 'ready'"


def main() -> None:
    """Measure as often as asked, and print a row each."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shape", default="512,512,600")
    options.add_argument("--times", type=int, default=3)
    chosen = options.parse_args()
    shape = tuple(int(size) for size in chosen.shape.split(","))
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_case(Path(scratch) / "data", shape)
        size = (folder / "imagesTr" / "large_0000.nii.gz").stat().st_size / 1e6
        print(f"{' × '.join(map(str, shape))} voxels, {size:.0f} MB .nii.gz")
        print("| First picture (s) | All (s) | Server's memory (MB) |\n| --: | --: | --: |")
        for number in range(chosen.times):
            first, last, memory = measured(folder, Path(scratch) / f"browser-{number}")
            print(f"| {first:.1f} | {last:.1f} | {memory:.0f} |", flush=True)


def write_case(folder: Path, shape: tuple[int, ...]) -> Path:
    """One scan, written slice by slice in one array of its own size, and its labels."""
    random = np.random.default_rng(0)
    scan = np.empty(shape, dtype=np.int16, order="F")
    x, y = (np.linspace(-1, 1, size) for size in shape[:2])
    body = x[:, None] ** 2 + (y[None, :] * 1.3) ** 2 < 0.8
    for level in range(shape[2]):
        noise = random.normal(0, 20, size=shape[:2])
        scan[..., level] = np.where(body, _WATER + noise, _AIR + noise / 4)
    labels = np.zeros(shape, dtype=np.uint8, order="F")
    near, far = (tuple(slice(n * a // 10, n * b // 10) for n in shape) for a, b in ((3, 5), (6, 7)))
    labels[near], labels[far] = 1, 2
    for name, voxels in {"imagesTr/large_0000": scan, "labelsTr/large": labels}.items():
        path = folder / f"{name}.nii.gz"
        path.parent.mkdir(parents=True)
        nib.save(nib.Nifti1Image(voxels, _SPACING), path)
    names = {"background": 0, "liver": 1, "spleen": 2}
    about = {"channel_names": {"0": "CT"}, "labels": names, "numTraining": 1, "file_ending": ".nii.gz"}
    (folder / "dataset.json").write_text(json.dumps(about))
    return folder


def measured(data: Path, profile: Path) -> tuple[float, float, float]:
    """Seconds to the first and the last picture, and the server's largest memory in MB."""
    profile.mkdir()
    command = [sys.executable, "-m", "panorgan", "view", str(data), "--no-browser", "--json"]
    with (
        chromium_with_webgl(profile) as browser,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            page = browser.open(json.loads(server.stdout.readline())["url"])
            page.wait_for(_READY)
            first, last = (int(page.value(f"document.body.dataset.{name}")) for name in ("firstPictureMs", "readyMs"))
            status = Path(f"/proc/{server.pid}/status").read_text()
        finally:
            server.terminate()
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    assert found is not None
    return first / 1000, last / 1000, int(found[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
