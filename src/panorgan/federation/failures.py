"""Why a site could not do what it was asked, as a code. Only the code travels; details stay in the site's log.

Error classes with a travelling code carry it as their `code`. A single error may have a more specific code
(`no-such-round`), which stays at the site.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

from panorgan.errors import AnatomyError, ConfigError, DataError, MessageError, PanorganError, RunError

Code = Literal[
    "wrong-experiment",
    "not-approved",
    "bad-request",
    "not-agreed",
    "too-many-questions",
    "config",
    "data",
    "data-changed",
    "disk",
    "memory",
    "state",
    "lost-state",
    "egress-refused",
    "diverged",
    "internal",
]

DIVERGED: Code = "diverged"

CODES: tuple[str, ...] = get_args(Code)

MEANING: dict[str, str] = {
    "wrong-experiment": "the site agreed to another experiment",
    "not-approved": "the site's files are not those that the site approved",
    "bad-request": "the site could not read the request",
    "not-agreed": "the request is not what the site agreed to",
    "too-many-questions": "the site was asked to score more models than was agreed",
    "config": "the site's own settings cannot be used",
    "data": "the site's data cannot be used",
    "data-changed": "the site's data has changed since the run began",
    "disk": "a file at the site could not be read or written",
    "memory": "the site ran out of memory",
    "state": "the site's saved state does not fit",
    "lost-state": "the site lacks the state of the round that it answered last",
    "egress-refused": "the site's policy does not let the answer leave",
    "diverged": "the site's loss or its own state is not finite any more",
    "internal": "an unexpected error at the site",
}


class EgressError(PanorganError):
    """The site's policy does not let something leave; `reasons` are the codes of all objections."""

    code = "egress-refused"
    reasons: tuple[str, ...] = ()


class NotApprovedError(ConfigError):
    """Files of the site's kit are not those that the hospital approved."""

    code = "not-approved"


class WrongExperimentError(PanorganError):
    """A request belongs to an experiment that the site did not agree to."""

    code = "wrong-experiment"


class NotAgreedError(RunError):
    """A request asks for, or brings, something that does not follow from the agreement."""

    code = "not-agreed"


class TooManyQuestionsError(NotAgreedError):
    """More models are to be scored than agreed; the counts are those of the run."""

    code = "too-many-questions"
    answered = 0
    agreed = 0


class LostStateError(RunError):
    """The coordinator has an answer of this site whose state is not here."""

    code = "lost-state"


class DataChangedError(DataError):
    """The site's cases differ from those with which it began the run."""

    code = "data-changed"


_FAMILIES: dict[type[PanorganError], Code] = {
    MessageError: "bad-request",
    ConfigError: "config",
    AnatomyError: "config",
    DataError: "data",
}
"""Errors without a travelling code; any other concerns the site's `state`."""


def code_of(error: BaseException) -> Code:
    """The code that travels for an error. It reveals nothing about files, patients or the code."""
    if isinstance(error, PanorganError):
        if (own := type(error).code) in CODES:
            return cast(Code, own)
        return next((code for family, code in _FAMILIES.items() if isinstance(error, family)), "state")
    # torch.OutOfMemoryError is a RuntimeError; its name is the same on every version.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "memory"
    if isinstance(error, OSError):
        return "disk"
    return "internal"
