"""What a shell completes: names of methods, organs and data sets. Quick, so nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable


def complete_method(incomplete: str) -> list[str]:
    """Methods that begin so."""
    return _beginning(_methods(), incomplete)


def complete_methods(incomplete: str) -> list[str]:
    """The same for the last of several methods, separated by commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(_methods(), last)]


def complete_organ(incomplete: str) -> list[str]:
    """Organs of the catalogue that begin so."""
    from panorgan.anatomy import catalogue

    return _beginning(catalogue(), incomplete)


def complete_data_set(incomplete: str) -> list[str]:
    """Public data sets that begin so."""
    from panorgan.fetching.catalogue import data_sets

    return _beginning(data_sets(), incomplete)


def _methods() -> Iterable[str]:
    from panorgan.methods.about.stored import stored_methods

    stored = stored_methods()
    if stored is not None:
        return stored.methods
    from panorgan.methods.registry import methods

    return methods()


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))
