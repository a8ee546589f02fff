"""Untrusted text (from sites, files, names) made safe to show: terminals obey control characters."""

from __future__ import annotations

import logging
import re

# C0 and C1 controls except tab and newline, delete, line separators, bidirectional marks (they let one name look like
# another), and surrogates, which cannot be encoded.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


def printable(text: str) -> str:
    """The text with every control character as a symbol: ␛ for escape. Tabs and newlines stay."""
    return _UNSAFE.sub(_symbol, text) if _UNSAFE.search(text) else text


def one_line(text: str) -> str:
    """The same without newlines: untrusted text must not look like a line of ours."""
    return printable(text).replace("\n", "␊").replace("\t", " ")


def is_printable(text: str) -> bool:
    """Whether a name can be shown unchanged."""
    return text.isprintable()


def _symbol(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else _REPLACEMENT


class PrintableFormatter(logging.Formatter):
    """Formats log lines, which are read in terminals too."""

    def format(self, record: logging.LogRecord) -> str:
        """The line as usual, made printable."""
        return printable(super().format(record))
