"""Shows `Loading…` while torch is imported, which takes many seconds on some machines."""

from __future__ import annotations

import importlib
import sys

from panorgan.cli.console import Console


def load(module: str) -> None:
    """Import a module, with a line on a terminal meanwhile; quiet elsewhere and with --json."""
    console = Console(stderr=True)
    if module in sys.modules or not console.is_terminal or "--json" in sys.argv:
        importlib.import_module(module)
        return
    with console.status("Loading…"):
        importlib.import_module(module)
