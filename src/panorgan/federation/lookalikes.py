"""Detects what looks like a scan, a file or a patient's number, which never leaves a site, whatever its policy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator

import torch

LONGEST_NAME = 200
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+-]*(/[A-Za-z0-9_][A-Za-z0-9_.:+-]*)*")
_DRIVE = re.compile(r"[A-Za-z]:")
_FILE = re.compile(
    r"\.(nii|gz|dcm|ima|mha|mhd|nrrd|npy|npz|pt|pth|json|jsonl|csv|tsv|txt|ya?ml|h5|zip|tar|xlsx?|png|jpe?g)$", re.I
)
# This many digits in a row suggest a patient's number, a date of birth or a DICOM identifier.
_IDENTIFIER = re.compile(r"[0-9]{6}")
# Below this, a tensor may have as many elements as a small patch by chance.
_FEWEST_VOXELS = 4096

SUSPICIONS = {
    "name-too-long": f"its name is longer than {LONGEST_NAME} characters",
    "name-like-file": "its name looks like a path or a file",
    "name-like-identifier": "its name holds a long number, which may be a patient's",
}
"""Why a name may not leave, by code."""


def image_test(shapes: Iterable[Iterable[int]]) -> Callable[[torch.Tensor], bool]:
    """A test whether a tensor is shaped like one of these volumes or patches.

    Axes in any order, alone or stacked (a batch, channels); or flattened, one value or one bit per voxel.
    """
    wanted = {tuple(sorted(_without_ones(shape))) for shape in shapes}
    wanted = {shape for shape in wanted if len(shape) > 1}
    counts = {math.prod(shape) for shape in wanted}
    flat = {count for count in counts if count >= _FEWEST_VOXELS}
    packed = {length for count in counts if (length := -(-count // 8)) >= _FEWEST_VOXELS}
    ranks = {len(shape) for shape in wanted}

    def looks_like_an_image(tensor: torch.Tensor) -> bool:
        # Ones at the end stay: [64, 64, 1, 1, 1] are the weights of a convolution, not a slice of 64 × 64.
        shape = list(tensor.shape)
        while shape and shape[0] == 1:
            shape.pop(0)
        if any(len(shape) >= rank and tuple(sorted(shape[-rank:])) in wanted for rank in ranks):
            return True
        if not shape or len(shape) > 2:
            return False
        return shape[-1] in flat or (tensor.dtype == torch.uint8 and shape[-1] in packed)

    return looks_like_an_image


def _without_ones(shape: Iterable[int]) -> Iterator[int]:
    return (int(size) for size in shape if size != 1)


def suspicious_name(name: str, is_ours: bool = False) -> str:
    """The code of why a key or a number's name may not leave; empty if it is harmless.

    `is_ours`: a weight of our own network.
    """
    if len(name) > LONGEST_NAME:
        return "name-too-long"
    if not _NAME.fullmatch(name) or _DRIVE.match(name) or any(_FILE.search(part) for part in name.split("/")):
        return "name-like-file"
    if not is_ours and _IDENTIFIER.search(name):
        return "name-like-identifier"
    return ""
