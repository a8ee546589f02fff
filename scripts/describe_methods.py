"""Write the stored descriptions of the methods, from the registry.

    python scripts/describe_methods.py

`panorgan methods` reads them instead of importing torch, as long as no file of `methods/` has changed since.
"""

from __future__ import annotations

from panorgan.methods.about.metadata import describe, fields_of
from panorgan.methods.about.stored import FILE, file_content
from panorgan.methods.base import MethodConfig
from panorgan.methods.registry import methods


def content() -> str:
    """The file, for the methods that come with panorgan."""
    own = [method for method in methods().values() if method.__module__.startswith("panorgan.")]
    return file_content([describe(method) for method in own], fields_of(MethodConfig))


if __name__ == "__main__":
    FILE.write_text(content(), encoding="utf-8")
