"""Every way to the terminal: names with control characters come out as symbols, rich's own colours stay."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

import panorgan.cli
from panorgan.cli import main as command_line
from panorgan.cli.console import Console, say, say_lines
from panorgan.cli.follow import say_with_time
from panorgan.cli.view import PlainView
from panorgan.errors import MessageError
from panorgan.federation.events import Event
from panorgan.workflows.event_words import event_line

EVIL = "north\x1b[2J\x1b]0;owned\x07\x9b31m"
CLI = Path(panorgan.cli.__file__).parent


def terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, color_system="standard", width=100), out


def test_tables_texts_and_plain_strings_are_made_printable():
    console, out = terminal()
    table = Table("site")
    table.add_row(EVIL)
    for shown in (table, Text(EVIL, style="red"), EVIL):
        console.print(shown, markup=False, highlight=False)
    assert "\x1b[2J" not in out.getvalue()
    assert "\x1b]0" not in out.getvalue()
    assert "\x9b" not in out.getvalue()
    assert out.getvalue().count("north␛[2J") == 3
    assert "\x1b[31m" in out.getvalue(), "rich may still colour"


def test_live_view_is_made_printable_too():
    console, out = terminal()
    with Live(Text(EVIL), console=console, auto_refresh=False):
        pass
    assert "north␛[2J" in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()


def test_plain_lines_cannot_be_forged(capsys):
    say(f"{EVIL}\nround 9/9 finished")
    PlainView("tiny")(Event("notice", {"number": 1, "text": f"{EVIL}\ntiny: finished"}))
    say_with_time(f"{EVIL}\n00:00:00  finished")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 3
    say_lines("two\nlines\n")
    assert capsys.readouterr().out == "two\nlines\n"


def test_refusals_in_a_followed_federation_are_shown_printably(capsys):
    line = event_line(Event("refused", {"number": 2, "site": EVIL, "reason": "no", "why": EVIL}))
    assert line is not None
    say(line)
    assert "\x1b" not in capsys.readouterr().out


def test_an_error_that_quotes_a_site_is_shown_printably(capsys):
    command_line._show_error(MessageError(f"Site {EVIL} sent too much.", where=EVIL, why=f"{EVIL}\nmore"))
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert "north␛" in shown


@pytest.mark.parametrize("path", sorted(CLI.glob("*.py")), ids=lambda path: path.name)
def test_commands_have_no_other_way_to_the_terminal(path):
    """Consoles are ours, and what is printed directly is JSON, which escapes, or goes through `one_line`."""
    if path.name == "console.py":
        return
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "rich.console":
            assert "Console" not in {name.name for name in node.names}, f"{path.name}:{node.lineno}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "typer.echo", "click.echo"):
            words = ast.unparse(node)
            safe = "json.dumps(" in words or "as_json(" in words or "one_line(" in words or "__version__" in words
            assert safe, f"{path.name}:{node.lineno}: {words}"
