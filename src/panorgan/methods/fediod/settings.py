"""The settings of FedIOD, and what they imply for a round: whether it is regularised, and what sites send."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from panorgan.errors import ConfigError
from panorgan.methods.base import MethodConfig, RoundInfo, published
from panorgan.methods.fediod.head_attribution import STEPS
from panorgan.methods.fediod.inter_organ import InterOrganSettings

_TRANSFORMER_RATE = {"adamw": 1 / 16}


class FedIODConfig(InterOrganSettings, MethodConfig):
    """A switch for every module, and its settings."""

    unlabelled: Literal["marginal"] = Field(
        "marginal", description="decoders of other organs stay at their sites, so they cannot be distilled"
    )
    # T
    transformer_rate: float | None = published(
        None,
        "1",
        "learning rate of the transformer as a share of all others'; null: 1/16 under adamw, 1 under sgd",
        gt=0,
    )
    # Reg
    regularisation: bool = published(True, "on", "Reg: keep attention between the fused maps (eqs. 10 to 14)")
    regularisation_weight: float = published(0.1, "not stated", "of each of the two losses", ge=0)
    regularisation_start: float = published(0.03, "not stated", "Reg from this share of the rounds on", ge=0, le=1)
    map_scans: float = published(
        0.2, "not stated", "τ: the share of a site's scans, its best, whose maps count", gt=0, le=1
    )
    map_depth: int = published(64, "no limit", "the largest number of slices of maps that travel (eq. 4)", ge=1)
    fusion_scale: float | None = published(
        None,
        "none",
        "of eqs. 8 and 9, as a softmax of squared distances: a site whose attention deviates from the mean by this "
        "multiple of even attention counts e^−1; null: by the distance itself, which is nearly a plain mean",
        gt=0,
    )
    alpha: float | None = published(
        None,
        "not stated",
        "the gate's steepness (eq. 12); null: 1000 · tokens / 256, which is as steep for any number",
        gt=0,
    )
    # DA
    dynamic_aggregation: bool = published(True, "on", "DA: attention heads are averaged by attribution (eqs. 17 to 20)")
    aggregation_start: float = published(
        0.03, "not stated", "DA from this share of the rounds on; before, heads have learned nothing", ge=0, le=1
    )
    attribution_scans: float = published(
        0.2, "not stated", "µ: the share of scans for attribution of heads", gt=0, le=1
    )
    attribution_steps: int = published(STEPS, "not stated", "S: steps of the integral (eq. 17)", ge=1)
    # Both
    refresh_every: int = published(1, "1", "rounds between two updates of maps and attributions", ge=1)

    @model_validator(mode="after")
    def _attention_is_there(self) -> FedIODConfig:
        if not self.transformer and (self.regularisation or self.dynamic_aggregation):
            raise ConfigError(
                "Without the transformer there is no attention.",
                code="no-attention",
                where="method.transformer",
                why="regularisation and dynamic aggregation work on it",
                fix="Switch method.regularisation and method.dynamic_aggregation off too.",
            )
        return self

    @property
    def has_gate(self) -> bool:
        """Whether attention re-weights the skip connections."""
        return self.transformer and self.gate != "none"

    def regularises(self, round_info: RoundInfo) -> bool:
        """Whether the losses of eqs. 10 and 11 apply in this round, if there are maps."""
        return (
            self.regularisation and self.regularisation_weight > 0 and round_info.progress >= self.regularisation_start
        )

    def maps_travel(self, round_info: RoundInfo) -> bool:
        """Whether sites send maps in this round: if the next one is regularised. In the first they have no depth."""
        later = (replace(round_info, round=r) for r in range(3, round_info.rounds + 1))
        first = next((after.round - 1 for after in later if self.regularises(after)), round_info.rounds)
        return first <= round_info.round < round_info.rounds and (round_info.round - first) % self.refresh_every == 0

    def sends_attributions(self, round_info: RoundInfo) -> bool:
        """Whether sites send attributions in this round."""
        if not self.dynamic_aggregation:
            return False
        started = (
            replace(round_info, round=r).progress >= self.aggregation_start for r in range(1, round_info.rounds + 1)
        )
        first = next((number for number, has in enumerate(started, start=1) if has), round_info.rounds)
        return round_info.round >= first and (round_info.round - first) % self.refresh_every == 0

    def module_starts(self, rounds: int) -> dict[str, int]:
        """The first round in which Reg and DA are active; the fused maps take two rounds."""
        schedule = [RoundInfo("train", number, rounds) for number in range(1, rounds + 1)]
        acts = {
            "Reg": [round_info.round for round_info in schedule[2:] if self.regularises(round_info)],
            "DA": [round_info.round for round_info in schedule if self.sends_attributions(round_info)],
        }
        return {module: numbers[0] for module, numbers in acts.items() if numbers}

    def transformer_factor(self, optimizer: str) -> float:
        """The transformer's share of the learning rate under an optimiser of that name."""
        if self.transformer_rate is not None:
            return self.transformer_rate
        return _TRANSFORMER_RATE.get(optimizer, 1.0)
