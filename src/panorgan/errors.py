"""Errors that say what happened, where, why, and how to fix it.

The library raises these and never prints or exits; the command line turns them into a message and an exit code.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PanorganError(Exception):
    """Base of every error a user may see.

    Parameters
    ----------
    what : one sentence, what went wrong.
    code : a short fixed word for programs and tests, such as ``not-3d``; it stays when the wording changes. A class
        for a single situation has it as a class attribute.
    where : the file, site, case or config key concerned.
    why : the reason, when it is not obvious from `what`.
    fix : what the user can do about it.
    """

    exit_code = 2
    code: str = ""

    def __init__(self, what: str, *, code: str = "", where: str = "", why: str = "", fix: str = "") -> None:
        self.what, self.code, self.where, self.why, self.fix = what, code or self.code, where, why, fix
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.what]
        lines += [f"  {label}: {text}" for label, text in self.details()]
        return "\n".join(lines)

    def details(self) -> list[tuple[str, str]]:
        """The non-empty parts after the first sentence, labelled."""
        parts = [("where", self.where), ("why", self.why), ("fix", self.fix)]
        return [(label, text) for label, text in parts if text]

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive pickling by themselves.
        return (_rebuild, (type(self), self.what, self.code, self.where, self.why, self.fix))


def _rebuild(kind: type[PanorganError], what: str, code: str, where: str, why: str, fix: str) -> PanorganError:
    error = kind.__new__(kind)
    PanorganError.__init__(error, what, code=code, where=where, why=why, fix=fix)
    return error


class ConfigError(PanorganError):
    """The experiment file, or an override of it, cannot be used as written."""


class AnatomyError(PanorganError):
    """An organ name is unknown or used in a way the anatomy does not allow."""


class DataError(PanorganError):
    """A scan, a label file or a data folder cannot be used."""


class RunError(PanorganError):
    """A run folder cannot be created, resumed or read."""


class MessageError(PanorganError):
    """Received bytes are not an acceptable message."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint such as ``did you mean 'liver'?``; empty if no known name is similar."""
    near = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.6)
    if not near:
        return ""
    return "did you mean " + " or ".join(repr(n) for n in near) + "?"
