"""Cut one CT and its multi-label TotalSegmentator map into several small case folders, to try the layout out.

    python examples/make_totalsegmentator_smoke.py example_ct.nii.gz example_seg_fast_force_split.nii.gz \
        runs/totalsegmentator_smoke
    panorgan train examples/totalsegmentator.yaml --run runs/totalsegmentator

The two files lie among the test references of TotalSegmentator's repository; any CT with the output of
`TotalSegmentator --ml` on the same grid will do. This is a smoke test: all cases show the same patient, and the labels
are a model's output. It shows that the folders are read and that a federation trains on them. It says nothing about
accuracy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nibabel as nib
import numpy as np

# Class ids of TotalSegmentator 2 (task "total").
ORGANS = {"spleen": 1, "kidney_right": 2, "kidney_left": 3, "liver": 5}
CASES = 8
# Voxels that are left over along each axis; every case begins elsewhere within them.
PLAY = (10, 8, 12)


def write_cases(ct: Path, labels: Path, out: Path) -> list[Path]:
    """Write `s0001/ct.nii.gz` and `s0001/segmentations/<organ>.nii.gz` and so on; returns the case folders."""
    image, segmentation = nib.load(ct), nib.load(labels)
    if image.shape != segmentation.shape or not np.allclose(image.affine, segmentation.affine, atol=1e-3):
        raise SystemExit(f"{labels} is not on the grid of {ct}: give the label map that belongs to this scan.")
    voxels, classes = np.asarray(image.dataobj), np.asarray(segmentation.dataobj)
    window = _around(np.isin(classes, list(ORGANS.values())))
    folders = []
    for number in range(CASES):
        # Steps without a common divisor with the number of cases: the three offsets do not repeat together.
        shift = [number * step % (play + 1) for step, play in zip((3, 5, 7), PLAY, strict=True)]
        crop = tuple(slice(a + s, b - p + s) for (a, b), s, p in zip(window, shift, PLAY, strict=True))
        affine = image.affine @ nib.affines.from_matvec(np.eye(3), [part.start for part in crop])
        folder = out / f"s{number + 1:04d}"
        (folder / "segmentations").mkdir(parents=True, exist_ok=True)
        nib.save(nib.Nifti1Image(voxels[crop].astype(np.int16), affine), folder / "ct.nii.gz")
        for organ, index in ORGANS.items():
            mask = (classes[crop] == index).astype(np.uint8)
            nib.save(nib.Nifti1Image(mask, affine), folder / "segmentations" / f"{organ}.nii.gz")
        folders.append(folder)
    return folders


def _around(mask: np.ndarray) -> list[tuple[int, int]]:
    """First and last voxel of the organs along each axis, with a margin as wide as the crops may move."""
    if not mask.any():
        raise SystemExit(f"The label map holds none of {', '.join(ORGANS)}.")
    places = np.argwhere(mask)
    low, high = places.min(0) - PLAY, places.max(0) + 1 + PLAY
    return [(max(0, int(a)), min(n, int(b))) for a, b, n in zip(low, high, mask.shape, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ct", type=Path, help="a CT, NIfTI")
    parser.add_argument("labels", type=Path, help="its TotalSegmentator label map (--ml), on the same grid")
    parser.add_argument("out", type=Path, help="folder for the case folders")
    arguments = parser.parse_args()
    folders = write_cases(arguments.ct, arguments.labels, arguments.out)
    print(f"{len(folders)} case folders in {arguments.out} (a smoke test: all of them show the same patient)")


if __name__ == "__main__":
    main()
