"""Where public data sets lie: in `PANORGAN_DATA`, or in the folder `data` of the working directory."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "PANORGAN_DATA"
_MARKS = (f"${{{VARIABLE}}}", f"${VARIABLE}")


def data_folder() -> Path:
    """The folder for data sets; it need not exist."""
    return Path(os.environ.get(VARIABLE) or "data").expanduser().absolute()


def with_data_folder(path: str | Path) -> Path:
    """A path of an experiment file, whose `$PANORGAN_DATA` at the beginning stands for that folder."""
    first, *rest = Path(path).parts or ("",)
    return data_folder().joinpath(*rest) if first in _MARKS else Path(path)


def is_in_data_folder(path: Path) -> bool:
    """Whether `panorgan fetch` could have put something there."""
    return path.resolve().is_relative_to(data_folder().resolve())
