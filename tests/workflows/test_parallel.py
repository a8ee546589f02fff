"""Work on many cases at once: order, progress, and one message for all bad cases."""

from __future__ import annotations

import re
import threading

import pytest
import torch

from panorgan.errors import DataError
from panorgan.workflows.parallel import InParallel, merge_errors


def quiet(what: str, done: int, total: int) -> None:
    """Ignore progress."""


def bad(where: str, what: str = "A label file holds undeclared label ids: [9].", code: str = "stray-id") -> DataError:
    return DataError(what, code=code, where=where, why="because", fix="Do this.")


def raiser(error: BaseException):
    def action() -> None:
        raise error

    return action


def test_results_keep_their_order_whoever_is_first() -> None:
    second_done = threading.Event()

    def slow() -> str:
        assert second_done.wait(10)
        return "slow"

    def quick() -> str:
        second_done.set()
        return "quick"

    assert InParallel(2, quiet)("x", [slow, quick]) == ["slow", "quick"]


def test_progress_counts_every_case() -> None:
    seen: list[tuple[str, int, int]] = []
    InParallel(1, lambda *facts: seen.append(facts))("preparing", [lambda: 1] * 3)
    assert seen == [("preparing", 1, 3), ("preparing", 2, 3), ("preparing", 3, 3)]


def test_one_bad_case_is_told_as_it_is() -> None:
    error = bad("a.nii.gz")
    with pytest.raises(DataError) as caught:
        InParallel(2, quiet)("x", [lambda: 1, raiser(error), lambda: 2])
    assert caught.value is error


def test_several_bad_cases_are_named_in_one_message() -> None:
    with pytest.raises(DataError) as caught:
        InParallel(2, quiet)("x", [raiser(bad("a.nii.gz")), lambda: 1, raiser(bad("b.nii.gz"))])
    assert caught.value.code == "stray-id"
    assert caught.value.where == "a.nii.gz\nb.nii.gz"
    assert "panorgan doctor" in caught.value.fix


def test_different_complaints_are_listed() -> None:
    error = merge_errors([bad("a"), bad("b", "A scan file cannot be read.", "file-unreadable")], total=5)
    assert error.code == "cases-unusable"
    assert re.findall(r"\d+", error.what) == ["2", "5"]
    assert error.why.splitlines() == ["A label file holds undeclared label ids: [9].", "A scan file cannot be read."]


def test_a_long_list_is_cut() -> None:
    error = merge_errors([bad(f"case_{i}") for i in range(13)], total=20)
    assert error.where.splitlines()[-2:] == ["case_9", "and 3 more"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(28, "disk full")])
def test_other_trouble_stops_everything_at_once(error) -> None:
    """Not when its turn comes: work that is still to be done is not begun."""
    stopped = threading.Event()
    begun: list[int] = []

    def first() -> None:
        assert stopped.wait(10)

    def later() -> None:
        begun.append(1)
        stopped.wait(10)

    def watch(what: str, done: int, total: int) -> None:
        """Ignore progress."""

    def fail() -> None:
        threading.Timer(0.2, stopped.set).start()
        raise error

    with pytest.raises(type(error)):
        InParallel(2, watch)("x", [first, fail, *[later] * 50])
    assert len(begun) < 10


def test_workers_compute_with_one_thread_and_leave_the_rest_as_it_was() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert InParallel(2, quiet)("x", [torch.get_num_threads] * 4) == [1, 1, 1, 1]
        assert torch.get_num_threads() == 3
        assert InParallel(1, quiet)("x", [lambda: 1]) == [1]
    finally:
        torch.set_num_threads(before)
