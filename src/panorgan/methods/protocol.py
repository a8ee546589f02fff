"""The types that a method's two halves exchange with each other and with the federation.

A site rule sees images and never a transport. A server rule sees these types only: none of them can hold an image
loader, a case or a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from panorgan.anatomy import Vocabulary

Tensors = Mapping[str, torch.Tensor]
Scalars = Mapping[str, float]


@dataclass(frozen=True)
class Payload:
    """The content of a message to or from a rule: tensors by key, scalars by name."""

    tensors: Tensors = field(default_factory=dict)
    scalars: Scalars = field(default_factory=dict)


@dataclass(frozen=True)
class Notice:
    """A notice about a run: a sentence for people, and a stable code for programs."""

    code: str
    text: str


@dataclass(frozen=True)
class SiteInfo:
    """A site's description of itself when it joins: counts, never cases."""

    name: str
    train_cases: int
    annotated: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"train_cases": self.train_cases, "annotated": dict(self.annotated)}

    @classmethod
    def from_json(cls, name: str, content: Mapping[str, Any]) -> SiteInfo:
        """The inverse of `as_json`."""
        annotated = {str(k): int(v) for k, v in content["annotated"].items()}
        return cls(name, int(content["train_cases"]), annotated)


@dataclass(frozen=True)
class Federation:
    """The vocabulary and the participating sites, sorted by name."""

    vocabulary: Vocabulary
    sites: Mapping[str, SiteInfo]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", dict(sorted(self.sites.items())))

    def organs_of(self, site: str) -> tuple[str, ...]:
        """The vocabulary organs that a site's annotation covers, in vocabulary order.

        These are the organs that it annotates, and the parts of an annotated union; not what lies unmarked inside an
        organ (a liver mask contains its tumours but does not show them).
        """
        whole = self.vocabulary
        covered = {o for s in self.sites[site].annotated for o in whole.members(s) if o not in whole.inside(s)}
        return tuple(organ for organ in whole if organ in covered)

    def labelled_organs(self) -> tuple[str, ...]:
        """The vocabulary organs that some site's annotation covers, in vocabulary order."""
        known = {organ for site in self.sites for organ in self.organs_of(site)}
        return tuple(organ for organ in self.vocabulary if organ in known)


@dataclass(frozen=True)
class Stage:
    """A named sequence of rounds (`pretrain`, `train`).

    `validate=False`: there is no meaningful global model yet, so none is scored. `local_steps`: optimiser steps per
    site and round instead of the experiment's number; 0 if the stage only exchanges tensors.
    """

    name: str
    rounds: int
    validate: bool = True
    local_steps: int | None = None


@dataclass(frozen=True)
class RoundInfo:
    """The current stage and round; `round` counts from 1."""

    stage: str
    round: int
    rounds: int

    @property
    def is_last(self) -> bool:
        """Whether it is the stage's last round."""
        return self.round == self.rounds

    @property
    def progress(self) -> float:
        """r / R."""
        return self.round / self.rounds


class TensorStore(Protocol):
    """Tensors that are written once and read often (teachers). The caller of a rule stores them on disk."""

    def put(self, name: str, tensors: Tensors) -> None:
        """Store tensors under a name, in place of all earlier ones."""

    def get(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors stored under a name, on the CPU; read-only."""

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""


class MemoryTensorStore:
    """A tensor store in memory, for tests and experiments."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, torch.Tensor]] = {}

    def put(self, name: str, tensors: Tensors) -> None:
        """Keep copies under a name."""
        self._kept[name] = {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}

    def get(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors kept under a name."""
        return dict(self._kept[name])

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._kept))


class Updates(Protocol):
    """The answers of one round as a server rule sees them: sites in sorted order, tensors read on demand."""

    @property
    def sites(self) -> Sequence[str]:
        """The sites that answered."""

    def scalars(self, site: str) -> Scalars:
        """The numbers that a site sent."""

    def keys(self, site: str) -> Sequence[str]:
        """The keys of the tensors that a site sent."""

    def tensor(self, site: str, key: str) -> torch.Tensor:
        """One tensor of one site."""

    def mean(self, weight: Callable[[str, str], float]) -> dict[str, torch.Tensor]:
        """Per key Σ w·θ / Σ w over the sites that sent it; `weight(site, key)` ≥ 0."""
