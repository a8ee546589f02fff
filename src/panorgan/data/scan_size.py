"""How large a scan will be in memory, by its header alone: what cannot fit is refused before it is read.

A few kilobytes can claim, or unpack to, more than any machine has.
"""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib

from panorgan.data.free_memory import free_memory
from panorgan.errors import DataError

# Between header and voxels a NIfTI file may hold other headers, never as much as this. To skip it takes time.
_LARGEST_OFFSET = 1 << 30
_FLOAT32 = 4
_HEADERS: tuple[Any, ...] = (nib.Nifti1Header, nib.Nifti2Header)


def check_room(where: Path, shape: Sequence[int], bytes_per_voxel: float) -> None:
    """Refuse a scan that does not fit into the free memory; where that is not known, everything fits."""
    free = free_memory()
    needed = math.prod(max(int(size), 0) for size in shape) * bytes_per_voxel
    if free is None or needed <= free:
        return
    raise DataError(
        "A scan does not fit into this machine's memory.",
        where=str(where),
        why=f"its header says {' × '.join(map(str, shape))} voxels, which take {_size(needed)}; {_size(free)} are free",
        fix="If the header is right, crop or resample the scan, close other programs, or use a larger machine. "
        "If not, the file is damaged or was made to do harm: remove the case.",
        code="too-large",
    )


def check_nifti_room(path: Path) -> None:
    """The same for a NIfTI file; one whose header cannot be understood is left to those who read it."""
    with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
        start = file.read(max(kind.sizeof_hdr for kind in _HEADERS))
    for kind in _HEADERS:
        if kind.sizeof_hdr in (int.from_bytes(start[:4], "little"), int.from_bytes(start[:4], "big")):
            break
    else:
        return
    header = kind(start[: kind.sizeof_hdr], check=False)
    offset = float(header["vox_offset"])
    if not offset <= _LARGEST_OFFSET:
        raise DataError(
            "A scan file cannot be read.",
            where=str(path),
            why=f"its header says that voxels begin after {_size(offset)} of other things",
            fix="The file is damaged. Copy it again from its source, or remove the case.",
            code="file-unreadable",
        )
    stored = int(header["bitpix"]) / 8
    scaled = (float(header["scl_slope"]), float(header["scl_inter"])) not in ((1.0, 0.0), (0.0, 0.0))
    check_room(path, [int(n) for n in header["dim"][1 : 1 + max(0, int(header["dim"][0]))]], stored + _FLOAT32 * scaled)


def check_itk_room(path: Path) -> None:
    """The same for what SimpleITK reads, which is there twice for a moment: as an image and as an array."""
    import SimpleITK as sitk  # noqa: N813

    reader = sitk.ImageFileReader()
    reader.SetFileName(str(path))
    reader.ReadImageInformation()
    bits = re.search(r"(\d+)-bit", sitk.GetPixelIDValueAsString(reader.GetPixelID()))
    stored = int(bits[1]) / 8 if bits else 8.0
    check_room(path, reader.GetSize(), 2 * stored * reader.GetNumberOfComponents())


def _size(count: float) -> str:
    """`3.2 GB`; 1 GB is 10^9 bytes."""
    for unit, scale in (("EB", 1e18), ("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} bytes"
