"""Why a site could not do what it was asked, as a code. Only the code travels; the story stays in the site's log."""

from __future__ import annotations

from typing import Literal, get_args

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
    """The site's policy does not let something leave."""


class NotApprovedError(ConfigError):
    """Files of the site's kit are not those that the hospital approved."""


class WrongExperimentError(PanorganError):
    """A request belongs to an experiment that the site did not agree to."""


class NotAgreedError(RunError):
    """A request asks for, or brings, what does not follow from the agreement."""


class TooManyQuestionsError(NotAgreedError):
    """More models are to be scored than the agreement leads to; counts are those of the run."""

    answered = 0
    agreed = 0


class LostStateError(RunError):
    """The coordinator has an answer of this site whose state is not here."""


class DataChangedError(DataError):
    """The site's cases are not those with which it began the run."""


_CODES_OF_ERRORS: tuple[tuple[type[PanorganError], Code], ...] = (
    (WrongExperimentError, "wrong-experiment"),
    (NotApprovedError, "not-approved"),
    (TooManyQuestionsError, "too-many-questions"),
    (NotAgreedError, "not-agreed"),
    (LostStateError, "lost-state"),
    (EgressError, "egress-refused"),
    (MessageError, "bad-request"),
    (ConfigError, "config"),
    (AnatomyError, "config"),
    (DataChangedError, "data-changed"),
    (DataError, "data"),
    (PanorganError, "state"),
)
"""What is special comes before what is general."""


def code_of(error: BaseException) -> Code:
    """The code for an error. It says nothing about files, patients or places in the code."""
    for kind, code in _CODES_OF_ERRORS:
        if isinstance(error, kind):
            return code
    # torch.OutOfMemoryError is a RuntimeError; its name is the same on every version.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "memory"
    if isinstance(error, OSError):
        return "disk"
    return "internal"
