"""What a run tells while it goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from panorgan.cli import view
from panorgan.cli.view import LiveView, PlainView, _Clock
from panorgan.federation.events import Event
from panorgan.workflows.event_words import event_line


@pytest.mark.parametrize(
    ("sites", "reported"),
    [
        ({"north": {"loss": 0.5, "cases": 3.0}, "south": {"cases": 2.0}}, "round 2/4 (pretrain)  loss north 0.500"),
        ({"north": {"cases": 3.0}}, "round 2/4 (pretrain)"),
    ],
    ids=["one trained", "a mere exchange"],
)
def test_a_round_in_which_not_everybody_trains(capsys, sites, reported):
    """A stage may have no steps, and a loss that is not finite is not sent."""
    facts = {"number": 2, "total": 4, "stage": "pretrain", "sites": sites, "validation": None, "best": None}
    PlainView("tiny")(Event("round", facts))
    line = capsys.readouterr().out
    assert line.startswith(f"tiny: {reported}  ")
    assert ("loss" in line) == ("loss" in reported)


def test_a_refusal_says_what_to_do_where_that_is_known(capsys):
    facts = {"number": 2, "site": "north", "code": "diverged", "reason": "Diverged.", "why": "NaN."}
    PlainView("tiny")(Event("refused", facts))
    PlainView("tiny")(Event("refused", {**facts, "fix": "Lower it."}))
    assert capsys.readouterr().out == (
        "tiny: refused an update of north: Diverged. NaN.\ntiny: refused an update of north: Diverged. NaN. Lower it.\n"
    )
    assert event_line(Event("refused", {**facts, "fix": "Lower it."})).endswith("NaN. Lower it.")


def test_what_a_method_wants_people_to_know_is_shown(capsys):
    notice = Event("notice", {"number": 4, "text": "No teacher knows liver."})
    PlainView("tiny")(notice)
    assert capsys.readouterr().out == "tiny: No teacher knows liver.\n"
    live = LiveView("tiny")
    live(notice)
    assert "No teacher knows liver." in [str(part) for part in live.render().renderables]
    assert event_line(notice) == "round 4: No teacher knows liver."


def test_the_split_and_scans_used_twice_are_shown(capsys):
    split = Event(
        "split", {"sites": {"north": {"train": 8, "validation": 2, "test": 3}, "isle": {"train": 0, "test": 4}}}
    )
    shared = Event("shared_scans", {"scans": ["north/a (train) = north/b (test)"]})
    view, plain = LiveView("tiny"), PlainView("tiny")
    for event in (split, shared):
        view(event)
        plain(event)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny: split isle 4 test; north 8 train, 2 validation, 3 test"
    assert "WARNING" in lines[1]
    shown = [str(part) for part in view.render().renderables]
    assert any("8 train, 2 validation, 3 test" in part for part in shown)
    assert any("north/a (train) = north/b (test)" in part for part in shown)


def test_notices_stay_on_the_screen_when_the_live_display_goes(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(view, "Console", lambda: Console(file=written, force_terminal=True, width=100))

    def stopped_by_ctrl_c() -> None:
        with view.watch("tiny") as listener:
            for _ in range(2):
                listener(Event("notice", {"number": 4, "text": "No teacher knows liver."}))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped_by_ctrl_c()
    end = written.getvalue().rpartition("\x1b[2K")[2]  # after the last line that the display has erased
    assert end.count("No teacher knows liver.") == 1


def test_time_left_runs_on_within_a_round():
    now = [0.0]
    clock = _Clock(lambda: now[0])
    clock.round_started()
    assert clock.left() == ""
    now[0] = 10.0
    clock.round_done(1, 4)
    assert clock.left() == "0:10 spent, 0:30 left"
    now[0] = 16.0
    clock.round_started()
    assert clock.left() == "0:16 spent, 0:24 left"
    now[0] = 60.0  # a long round, such as one with a validation
    assert clock.left() == "1:00 spent, 0:20 left"
    clock.round_done(4, 4)
    now[0] = 70.0
    assert clock.left() == "1:10 spent, 0:00 left"


def test_the_live_view_moves_during_validation():
    view = LiveView("tiny")
    view(Event("validate", {"site": "north", "done": 3, "total": 5}))
    (work,) = [task for task in view._progress.tasks if task.visible and task.total == 5]
    assert (work.description, work.completed) == ("north validates", 3)


def test_an_extension_is_no_interruption(capsys):
    PlainView("tiny")(Event("resumed", {"extended": True}))
    PlainView("tiny")(Event("resumed", {}))
    longer, resumed = capsys.readouterr().out.splitlines()
    assert resumed == "tiny: resuming"
    assert "more rounds" in longer
