"""Programs that a test interrupts with Ctrl-C."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """A shell starts what runs in its background deaf to Ctrl-C, tests too: for `preexec_fn` of a test's program."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
