"""Write the stored descriptions of the methods, and the names of the settings.

    python scripts/describe_methods.py

`panorgan methods` reads the descriptions instead of importing torch, as long as no file of `methods/` has changed
since; commands look up the names before they import it (`panorgan.cli.quick_check`).
"""

from __future__ import annotations

from panorgan.cli import quick_check
from panorgan.config import Experiment
from panorgan.methods.about.metadata import describe, fields_of
from panorgan.methods.about.stored import FILE, file_content
from panorgan.methods.base import MethodConfig
from panorgan.methods.registry import methods


def content() -> str:
    """The descriptions, of the methods that come with panorgan."""
    own = [method for method in methods().values() if method.__module__.startswith("panorgan.")]
    return file_content([describe(method) for method in own], fields_of(MethodConfig))


if __name__ == "__main__":
    FILE.write_text(content(), encoding="utf-8")
    quick_check.FILE.write_text(quick_check.file_content(Experiment), encoding="utf-8")
