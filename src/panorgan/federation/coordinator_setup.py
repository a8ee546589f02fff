"""The inputs of a coordinator: what the federation trains, and which sites it may ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from panorgan.anatomy import Vocabulary
from panorgan.federation.limits import LimitSettings
from panorgan.federation.settings import Patience, TrainingSettings
from panorgan.methods.base import Method
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.preparation.plan import PlanSettings


@dataclass(frozen=True)
class CoordinatorSetup:
    """What the federation trains, and how.

    `experiment` is the fingerprint of the agreement. `plan` says how cases are prepared, or how that follows from the
    sites' measurements; None if the sites' cases are prepared already.
    """

    run: str
    vocabulary: Vocabulary
    method: Method
    network: UNetSettings
    training: TrainingSettings
    seed: int = 0
    experiment: str = ""
    plan: PlanSettings | None = None
    patience: Patience = field(default_factory=Patience)
    limits: LimitSettings = field(default_factory=LimitSettings)
    """Limits for what a site may claim."""
    required: tuple[str, ...] = ()
    """Sites without which the run does not begin."""
    awaited: tuple[str, ...] = ()
    """Sites that may join later, and bring organs that no other site annotates."""
    joins_at: Mapping[str, int] = field(default_factory=dict)
    """Sites that are not asked before a round of the whole run, though reachable: a simulation of late joining."""
    listed: frozenset[str] | None = None
    """Sites that may take part; if None, all that the transport reaches. A site that joined and is no longer listed has
    left: its contribution stays, and the coordinator does not wait for it."""
    keep_local_models: Path | None = None
    """Folder for each site's model of one round. For simulations only: between hospitals no single site's model is
    kept."""
    local_models_after: float = 1.0
    """That round, as a share of the training rounds."""
    start: Callable[[], SegmentationNetwork] | None = None
    """Reads the model that training starts from (`training.start_from`); called when weights are first needed."""
