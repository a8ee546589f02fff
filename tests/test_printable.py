"""Text from elsewhere cannot steer a terminal."""

from __future__ import annotations

import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panorgan.printable import PrintableFormatter, is_printable, one_line, printable


@given(st.text(alphabet=st.characters()))
def test_whatever_the_text_no_control_character_is_left(text):
    shown = printable(text)
    assert not [c for c in shown if ord(c) < 0x20 and c not in "\t\n"]
    assert not [c for c in shown if 0x7F <= ord(c) < 0xA0]
    shown.encode("utf-8")
    assert len(shown) == len(text), "columns stay where they are"
    assert "\n" not in one_line(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("liver: 0.93 ± 0.02 – Körper 肝臓", "liver: 0.93 ± 0.02 – Körper 肝臓"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[2J", "␛[2J"),
        ("\x9b2J\x7f\r", "\ufffd2J␡␍"),
        ("invoice\u202egnp.exe", "invoice\ufffdgnp.exe"),
        ("name\udcff", "name\ufffd"),
    ],
)
def test_by_hand(text, shown):
    assert printable(text) == shown


def test_names():
    assert is_printable("annotated/kidney_left")
    assert not is_printable("loss\n")
    assert not is_printable("\x1b[1m")


def test_log_lines_are_made_printable_with_their_tracebacks():
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(PrintableFormatter("%(levelname)s %(message)s"))
    log = logging.Logger("own")
    log.addHandler(handler)
    try:
        raise ValueError("bad \x1b]0;title\x07")
    except ValueError:
        log.exception("asked: %s", "\x1b[31mred")
    assert "\x1b" not in out.getvalue()
    assert "␛[31mred" in out.getvalue()
    assert "ValueError: bad ␛]0;title␇" in out.getvalue()
