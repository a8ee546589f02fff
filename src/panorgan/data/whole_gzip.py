"""`.nii.gz` files read to their end, where gzip keeps a checksum; nibabel stops at the last voxel and never sees it."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nibabel.fileholders import FileHolder

_BLOCK = 1 << 20


@contextmanager
def whole_gzip(image: Any, path: Path) -> Iterator[Any]:
    """The same image to take the voxels from. What follows them is read in the end: raises if the checksum differs."""
    if not path.name.endswith(".nii.gz"):
        yield image
        return
    with gzip.open(path, "rb") as stream:
        yield type(image).from_file_map({"image": FileHolder(str(path), stream)})
        try:
            while stream.read(_BLOCK):
                pass
        except (gzip.BadGzipFile, zlib.error) as error:
            if "Not a gzipped file" not in str(error):  # bytes behind the end; gunzip ignores them too
                raise
