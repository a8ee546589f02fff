"""Why a site could not do what it was asked, as a code. Only the code travels; the story stays in the site's log."""

from __future__ import annotations

from typing import Literal, get_args

from panorgan.errors import AnatomyError, ConfigError, DataError, MessageError, PanorganError

Code = Literal[
    "wrong-experiment",
    "not-approved",
    "bad-request",
    "config",
    "data",
    "disk",
    "memory",
    "state",
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
    "config": "the site's own settings cannot be used",
    "data": "the site's data cannot be used",
    "disk": "a file at the site could not be read or written",
    "memory": "the site ran out of memory",
    "state": "the site's saved state does not fit",
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


def code_of(error: BaseException) -> Code:
    """The code for an error. It says nothing about files, patients or places in the code."""
    if isinstance(error, WrongExperimentError):
        return "wrong-experiment"
    if isinstance(error, NotApprovedError):
        return "not-approved"
    if isinstance(error, EgressError):
        return "egress-refused"
    if isinstance(error, MessageError):
        return "bad-request"
    if isinstance(error, ConfigError | AnatomyError):
        return "config"
    if isinstance(error, DataError):
        return "data"
    if isinstance(error, PanorganError):
        return "state"
    # torch.OutOfMemoryError is a RuntimeError; its name is the same on every version.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "memory"
    if isinstance(error, OSError):
        return "disk"
    return "internal"
