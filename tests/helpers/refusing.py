"""Expect an error by its code, which stays when its sentences change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from panorgan.errors import PanorganError


@contextmanager
def refused(code: str, kind: type[PanorganError] = PanorganError) -> Iterator[pytest.ExceptionInfo[PanorganError]]:
    """`pytest.raises`, and the error's code is this one."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, caught.value
