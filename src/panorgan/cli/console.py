"""The only ways to the terminal: control characters in the output have no effect."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO

from rich import console as rich_console
from rich.segment import Segment

from panorgan.printable import one_line, printable


class Console(rich_console.Console):
    """rich's console; only rich itself may send control codes."""

    def render(
        self, renderable: rich_console.RenderableType, options: rich_console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments of text, made printable."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text)
            yield segment if text is segment.text else Segment(text, segment.style)


def say(text: str, file: IO[str] | None = None) -> None:
    """A line of plain text. A newline in it could make untrusted text look like a line of ours."""
    say_lines(one_line(text) + "\n", file)


def say_lines(text: str, file: IO[str] | None = None) -> None:
    """Text of several lines, as it is."""
    print(printable(text), file=file or sys.stdout, flush=True, end="")
