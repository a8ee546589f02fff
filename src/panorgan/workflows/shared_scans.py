"""No scan may be both trained on and tested, or be at two sites; decided by the files' content, not their names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from panorgan.data.case import Case
from panorgan.errors import DataError
from panorgan.preparation.store import Store
from panorgan.workflows.parallel import InParallel
from panorgan.workflows.site_cases import SiteCases

_NAMED = 10


@dataclass(frozen=True)
class Use:
    """Where a scan is used."""

    site: str
    split: str
    case: str

    def __str__(self) -> str:
        return f"{self.site}/{self.case} ({self.split})"


def check_shared_scans(sites: Sequence[SiteCases], store: Store, work: InParallel, allowed: bool) -> tuple[str, ...]:
    """Refuse scans that are used twice; where that is `allowed`, name them, a line per scan.

    Files are compared by their bytes (through hashes that the store keeps). The doctor compares voxels, which also
    finds a scan that was saved again.
    """
    shared = [" = ".join(map(str, uses)) for uses in _shared(sites, store, work)]
    if not shared or allowed:
        return tuple(shared)
    more = [f"and {len(shared) - _NAMED} more"] if len(shared) > _NAMED else []
    raise DataError(
        f"{len(shared)} {'scan is' if len(shared) == 1 else 'scans are'} used twice.",
        where="\n".join([*shared[:_NAMED], *more]),
        why="a test on a scan that was trained on measures memory, and a scan at two sites is one patient, not two",
        fix="Name one of each pair in 'leave_out' under its site. To continue anyway, set 'allow_shared_scans: true': "
        "the report will then say so.",
        code="shared-scan",
    )


def _shared(sites: Sequence[SiteCases], store: Store, work: InParallel) -> list[list[Use]]:
    """Uses of every scan that is in two splits or at two sites. Two copies in one split of one site leak nothing."""
    todo: list[tuple[Use, Callable[[], str | None]]] = []
    for site in sites:
        for split, cases in site.splits().items():
            name = "external" if site.external else split
            todo += [(Use(site.name, name, case.id), partial(_content, store, case)) for case in cases]
    found: dict[str, list[Use]] = defaultdict(list)
    for (use, _), content in zip(todo, work("comparing scans", [action for _, action in todo]), strict=True):
        if content is not None:
            found[content].append(use)
    groups = [uses for uses in found.values() if len({(use.site, use.split) for use in uses}) > 1]
    return sorted(groups, key=lambda uses: str(uses[0]))


def _content(store: Store, case: Case) -> str | None:
    """None for unreadable files: preparing them gives a better error."""
    try:
        return store.scan_of(case)
    except OSError:
        return None
