"""Errors by their code: sentences may change, a code stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from panorgan.errors import PanorganError


@contextmanager
def refused(code: str, kind: type[PanorganError] = PanorganError) -> Iterator[pytest.ExceptionInfo[PanorganError]]:
    """As `pytest.raises`, for an error with this code."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code!r}: {caught.value}"
