"""Words about methods, for the terminal and for pages. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

NETWORKS = {
    "any": "yours (`network.organs`)",
    "own": "its own",
    "channels": "one output for all organs",
    "heads": "a head per organ",
    "task_blocks": "a task block per organ",
    "decoders": "a decoder per organ",
    "encoders": "an encoder per organ",
}

GROUPS = {
    "systems": "Systems for partial labels",
    "rules": "Federated averaging and its relatives",
    "losses": "Losses for partial labels",
    "networks": "Networks for partial labels",
    "pseudo_labels": "On pseudo labels",
    "bounds": "To compare with",
}
"""The groups in which methods are listed, in this order; others come after them, under their own names."""


class Listed(Protocol):
    """A method with its group."""

    @property
    def group(self) -> str:
        """One of `GROUPS`, or a plugin's own."""


ListedT = TypeVar("ListedT", bound=Listed)


def by_group(described: Iterable[ListedT]) -> dict[str, list[ListedT]]:
    """Methods by the title of their group, in the order of `GROUPS`."""
    found: dict[str, list[ListedT]] = {title: [] for title in GROUPS.values()}
    for one in described:
        found.setdefault(GROUPS.get(one.group, one.group), []).append(one)
    return {title: members for title, members in found.items() if members}


class Sent(Protocol):
    """An upload, as measured or as stored."""

    @property
    def stage(self) -> str:
        """Its stage."""

    @property
    def rounds(self) -> str:
        """In which rounds."""

    @property
    def words(self) -> str:
        """Weights and tensors in one phrase."""

    @property
    def size(self) -> float:
        """In bytes."""

    @property
    def relative(self) -> float:
        """Its size relative to a round of FedAvg."""


class Described(Protocol):
    """A description, as made from a method or as stored."""

    @property
    def text(self) -> str:
        """What the method is."""

    @property
    def paper(self) -> str:
        """Where it was published."""

    @property
    def labels(self) -> str:
        """`annotated` or `withheld`."""


def size_words(upload: Sent) -> str:
    """Its size relative to FedAvg's round, short."""
    return "0" if not upload.size else "< 0.01" if upload.relative < 0.01 else f"{upload.relative:.2f}"


def pooled_words(description: Described) -> str:
    """Where its cases come from, for a method without a federation."""
    labels = ", with the labels that a benchmark holds back for scoring" if description.labels == "withheld" else ""
    return f"All cases are in one place{labels}. Nothing is sent: this is not a federation."


def variant_words(sent: Iterable[Sent]) -> str:
    """What leaves a site under another setting, in one line."""
    return "; ".join(f"{s.stage}, {s.rounds}: {s.words} ({size_words(s)})" for s in sent)


def body(description: Described) -> str:
    """The text of its file, beginning with a capital; a reference that is listed separately is not repeated."""
    first, _, rest = description.text.partition("\n")
    if description.paper:
        first = first.removesuffix(description.paper).rstrip()
    return f"{first[:1].upper()}{first[1:]}\n{rest}".strip()


def as_yaml(value: Any) -> str:
    """A plain value as written in an experiment file."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(as_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {as_yaml(inner)}' for name, inner in value.items())}}}"
    return f"{value:g}" if isinstance(value, float) else str(value)
