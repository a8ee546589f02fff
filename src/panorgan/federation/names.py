"""Names that a site sends: they appear in logs, tables and on screens, so they must be known, or at least printable."""

from __future__ import annotations

from collections.abc import Iterable

from panorgan.anatomy import Vocabulary
from panorgan.errors import AnatomyError, MessageError
from panorgan.printable import is_printable

_LONGEST_NAME = 200


def check_names(names: Iterable[str], site: str) -> None:
    """Refuse numbers whose names cannot be printed."""
    for name in names:
        if not is_printable(name) or len(name) > _LONGEST_NAME:
            raise MessageError(
                f"Site {site} sent a number with a name that cannot be shown.",
                code="unprintable-name",
                why=f"{name!r:.100} is too long, or holds control characters",
            )


def check_structures(names: Iterable[str], vocabulary: Vocabulary, site: str, does: str) -> None:
    """Refuse structures outside the vocabulary; `does` says what the site does with them."""
    for name in names:
        try:
            vocabulary.members(name)
        except AnatomyError as error:
            raise MessageError(
                f"Site {site} {does} what is not in the vocabulary.", code="unknown-structure", why=f"{name!r:.100}"
            ) from error
