"""Errors that a person can act on, and a program can tell apart."""

from __future__ import annotations

import pickle

from panorgan.errors import DataError


def test_the_code_of_an_error_is_for_programs_and_crosses_processes():
    error = DataError("A scan is odd.", where="a.nii", why="so it is", fix="mend it", code="odd-scan")
    assert "odd-scan" not in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (again.code, str(again)) == ("odd-scan", str(error))
    assert DataError("A scan is odd.").code == ""
