"""What a coordinator is told: what the federation trains, and whom it may ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from panorgan.anatomy import Vocabulary
from panorgan.federation.limits import LimitSettings
from panorgan.federation.settings import Patience, TrainingSettings
from panorgan.methods.base import Method
from panorgan.networks import UNetSettings
from panorgan.preparation.plan import PlanSettings


@dataclass(frozen=True)
class CoordinatorSetup:
    """What the federation trains, and how.

    `experiment` is the fingerprint of what everybody agreed to. `plan` says how cases are prepared, or how that
    follows from what the sites measure; none where the sites' cases are prepared already.
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
    """What a site may claim."""
    required: tuple[str, ...] = ()
    """Sites without which the run does not begin."""
    awaited: tuple[str, ...] = ()
    """Sites that may join later, and bring organs that nobody else knows."""
    joins_at: Mapping[str, int] = field(default_factory=dict)
    """Sites that are not asked before a round of the whole run, though they are there: a simulation of late joining."""
    listed: frozenset[str] | None = None
    """Sites that may take part; whoever the transport reaches, if None. One that joined and is no longer listed has
    left: what it taught stays, and nobody waits for it."""
    keep_local_models: Path | None = None
    """Folder for what each site sent in one round, as a model of its own. For simulations: between hospitals no single
    site's model is kept."""
    local_models_after: float = 1.0
    """Which round that is, as a share of the training rounds."""
