"""Kits that are no longer accepted: per participant, all certificates that were issued up to a moment.

A renewed kit, whose certificate is younger, is accepted again without a change to the list.
"""

from __future__ import annotations

import calendar
import datetime
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

from panorgan.errors import ConfigError
from panorgan.federation.files import write_atomically

REVOKED = "revoked.yaml"
"""In `local/` of the server's kit."""

_HEAD = """\
# Kits that the server refuses: per participant, every certificate that was issued up to this moment (world time).
# 'panorgan federation revoke' adds lines. The server looks at this file with every message; nothing needs a restart.
# A kit that is renewed afterwards is let in; to take a revocation back, remove its line.
"""
_FORM = "%Y-%m-%dT%H:%M:%SZ"


def read_revocations(path: Path) -> dict[str, float]:
    """Moments in seconds since 1970, by participant; none where there is no file."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(content, dict | None):
        raise _unreadable(path, "it is not a list of 'name: moment' lines")
    return {str(name): _moment(path, str(name), value) for name, value in (content or {}).items()}


def revoke(path: Path, name: str, until: float) -> bool:
    """Add a participant; returns whether that changed anything. An existing entry with a later moment stays."""
    known = read_revocations(path)
    if known.get(name, 0.0) >= int(until):
        return False
    lines = "".join(
        f"{yaml.safe_dump(who).splitlines()[0]}: {format_moment(moment)}\n"
        for who, moment in sorted({**known, name: until}.items())
    )
    write_atomically(path, _HEAD + lines, durable=True)
    return True


def format_moment(moment: float) -> str:
    """`2026-11-15T17:24:29Z`."""
    return time.strftime(_FORM, time.gmtime(moment))


class RevocationList:
    """The file, read again when it has changed. If it becomes unreadable, the last version stays in force."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._known: Mapping[str, float] | None = None
        self.trouble = ""

    def until(self, name: str) -> float | None:
        """Up to when this participant's certificates are revoked; None if they are not.

        Every site is refused (infinity) while there is a list that could not be read yet.
        """
        stamp = self._look()
        if self._known is None or stamp != self._stamp:
            self._stamp = stamp
            try:
                self._known, self.trouble = read_revocations(self._path), ""
            except ConfigError as error:
                self.trouble = str(error)
        return float("inf") if self._known is None else self._known.get(name)

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _moment(path: Path, name: str, value: object) -> float:
    """YAML parses a moment as one; in quotes it stays text."""
    if isinstance(value, datetime.datetime):
        return value.replace(tzinfo=value.tzinfo or datetime.UTC).timestamp()
    try:
        return float(calendar.timegm(time.strptime(str(value), _FORM)))
    except ValueError as error:
        raise _unreadable(path, f"{name}: {value!r} is not a moment such as 2026-11-15T17:24:29Z") from error


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        "The list of revoked kits cannot be read.",
        code="revocations-unreadable",
        where=str(path),
        why=why,
        fix="Correct that place.",
    )
