"""When the modules of UFPS are active: one table, and one function that reads it. See `method` for the modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from panorgan.methods.protocol import RoundInfo
from panorgan.methods.shared.teacher_stages import TRAIN
from panorgan.methods.ufps.settings import UFPSConfig

Module = Literal["WS", "aRCE", "GMT", "UA", "SAM"]


@dataclass(frozen=True)
class Phase:
    """When a module is active: in rounds r ≥ start · R, and r < end · R if it ends.

    `start` and `end` name the config fields that hold these shares of the rounds. `warm_up` rounds pass first, however
    short the run.
    """

    module: Module
    is_on: Callable[[UFPSConfig], bool]
    start: str
    end: str = ""
    warm_up: int = 0

    def is_active(self, config: UFPSConfig, round_: int, rounds: int) -> bool:
        """Whether the module is active in a training round, if it is on."""
        share = round_ / rounds
        begun = share >= getattr(config, self.start) and round_ > self.warm_up
        return begun and (not self.end or share < getattr(config, self.end))


PHASES = (
    # WS compares a case with the site's others: at least one round fills the bank before it begins.
    Phase("WS", lambda c: c.weight_schedule != "none", "schedule_start", "schedule_end", warm_up=1),
    Phase("aRCE", lambda c: c.reverse_ce, "reverse_ce_start"),
    # GMT then begins organ by organ, see `readiness`.
    Phase("GMT", lambda c: c.main_teacher, "main_teacher_start"),
    Phase("UA", lambda c: c.uncertainty_aware != "none", "uncertainty_start"),
    Phase("SAM", lambda c: c.sharpness != "none" and c.rho > 0, "sharpness_start"),
)
"""In the paper's 500 rounds: WS 10 to 199, aRCE from 200; GMT, UA and sUSAM from 300 on."""


def active(config: UFPSConfig, round_info: RoundInfo) -> frozenset[Module]:
    """The modules active in a round; none outside of training."""
    if round_info.stage != TRAIN:
        return frozenset()
    on = (phase for phase in PHASES if phase.is_on(config))
    return frozenset(phase.module for phase in on if phase.is_active(config, round_info.round, round_info.rounds))


def rounds_of(module: Module, config: UFPSConfig, rounds: int) -> list[int]:
    """The training rounds in which a module is active, of so many; none if it is off."""
    (phase,) = (phase for phase in PHASES if phase.module == module)
    return [r for r in range(1, rounds + 1) if phase.is_on(config) and phase.is_active(config, r, rounds)]


def starts(config: UFPSConfig, rounds: int) -> dict[str, int]:
    """The first training round of every module that becomes active."""
    acts = {phase.module: rounds_of(phase.module, config, rounds) for phase in PHASES}
    return {module: numbers[0] for module, numbers in acts.items() if numbers}


def refreshes_masks(config: UFPSConfig, round_info: RoundInfo) -> bool:
    """Whether sUSAM's masks are due: in its first round, and from then on where r mod r_fre = 1 (Algorithm 3)."""
    first = rounds_of("SAM", config, round_info.rounds)[:1]
    return [round_info.round] == first or round_info.round % config.mask_every == 1 % config.mask_every


def has_bank(config: UFPSConfig) -> bool:
    """Whether any module depends on the teachers' uncertainty."""
    return config.weight_schedule != "none" or config.uncertainty_aware != "none"


def fills_bank(config: UFPSConfig, round_info: RoundInfo) -> bool:
    """Whether a module uses the bank in this round or later: UA to the end, WS up to its last round."""
    last = rounds_of("WS", config, round_info.rounds)[-1:]
    return config.uncertainty_aware != "none" or (bool(last) and round_info.round <= last[0])
