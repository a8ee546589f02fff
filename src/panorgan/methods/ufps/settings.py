"""The settings of UFPS, with a switch for every module. `method` explains the choices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from panorgan.errors import ConfigError
from panorgan.losses.main_teacher import Disagreement
from panorgan.methods.base import published
from panorgan.methods.shared.pseudo_labels import PseudoLabelConfig
from panorgan.methods.ufps.cmidg import CMIDGSettings


class UFPSConfig(PseudoLabelConfig):
    """A switch for every module, and its settings."""

    encoder_supervision: float = published(
        0.0,
        "on, weight not stated",
        "weight of the loss of outputs after the encoder's levels, all but the finest; 0 for no such outputs",
        ge=0,
    )
    # WS
    weight_schedule: Literal["none", "tail_shift", "base_decrement", "round_trip_gaussian"] = published(
        "tail_shift", "tail_shift", "WS: how samples are weighted (eq. 8)"
    )
    schedule_start: float = published(
        0.02, "10/500", "WS from this share of the rounds on, and not in the first", ge=0, le=1
    )
    schedule_end: float = published(0.4, "200/500", "WS up to this share of the rounds", ge=0, le=1)
    schedule_tail: float = published(0.7, "0.7", "the quantile above which a case is in the tail, U_T", ge=0, le=1)
    # aRCE
    reverse_ce: bool = published(True, "on", "aRCE: reverse cross-entropy that grows with time (eq. 9)")
    reverse_ce_weight: float = published(0.01, "0.01", "its weight", ge=0)
    reverse_ce_start: float = published(0.4, "200/500", "aRCE from this share of the rounds on", ge=0, le=1)
    # GMT
    main_teacher: bool = published(True, "on", "GMT: the global model as the main teacher (eq. 5)")
    main_teacher_start: float = published(0.6, "300/500", "GMT not before this share of the rounds", ge=0, le=1)
    main_teacher_dice: float = published(
        0.5,
        "not stated",
        "the validation Dice from which on the global model knows an organ, by the sites that annotate it; with 0 "
        "no score is needed, and all organs begin together",
        ge=0,
        le=1,
    )
    main_teacher_gain: float = published(
        0.02,
        "not stated",
        "an organ has converged once a validation gains at most this much Dice over the best before; 1 waits for none",
        ge=0,
        le=1,
    )
    main_teacher_share: float = published(
        0.8, "0.8", "v: with less agreement the main teacher decides alone", ge=0, le=1
    )
    disagreement: Disagreement = published(
        "left_out",
        "left_out",
        "voxels on which main teacher and teachers differ where both count: left out of the loss, or background",
    )
    # UA
    uncertainty_aware: Literal["none", "decoder", "encoder", "all"] = published(
        "decoder", "decoder", "UA: the part of the network that is weighted by certainty too (eq. 7)"
    )
    uncertainty_start: float = published(0.6, "300/500", "UA from this share of the rounds on", ge=0, le=1)
    mean_temperature: float = published(0.05, "0.05", "τ^μ", gt=0)
    variance_temperature: float = published(0.001, "0.001", "τ^σ", gt=0)
    # sUSAM
    sharpness: Literal["none", "augmented", "asam", "random", "usam", "both", "topk", "susam"] = published(
        "susam",
        "susam",
        "asam: perturb by the gradient on the same images; usam: on augmented ones; topk: and only weights with the "
        "largest gradients; susam: and some on which sites disagree. Figure 8's others: augmented: plain steps on "
        "augmented images; random: as far as asam, anywhere; both: usam, and the step on the augmented images too",
    )
    perturbed_share: float = published(
        1.0,
        "1",
        "share of the gradient at the perturbed point in the step; the rest is that of a plain step",
        gt=0,
        le=1,
    )
    sharpness_start: float = published(0.6, "300/500", "from this share of the rounds on", ge=0, le=1)
    rho: float = published(0.7, "0.7", "radius of the perturbation, ρ; 0 for plain steps", ge=0)
    eta: float = published(
        0.001, "0.001", "keeps weights near zero mobile: the scale is the magnitude of a weight plus η", ge=0
    )
    scale_biases: bool = published(True, "on", "biases are perturbed in their own scale too; off: T = 1")
    local_share: float = published(0.4, "0.4", "T_L: the share of weights in M_L", ge=0, le=1)
    global_share: float = published(0.1, "0.1", "T_G: the largest share of weights in M_E", ge=0, le=1)
    mask_every: int = published(5, "5", "r_fre: masks are made where r mod r_fre = 1, and in the first round", ge=1)
    gradient_momentum: float = published(0.9, "0.9", "α_mo of eq. 11", ge=0, lt=1)
    augmentation: CMIDGSettings = Field(CMIDGSettings(), description="CMIDG of the images that give the perturbation")

    @model_validator(mode="after")
    def _schedule_has_rounds(self) -> UFPSConfig:
        if self.weight_schedule != "none" and self.schedule_start >= self.schedule_end:
            raise ConfigError(
                f"WS would begin at {self.schedule_start} of the rounds and end at {self.schedule_end}.",
                code="empty-schedule",
                where="method.schedule_start",
                fix="Let it begin before it ends, or set weight_schedule: none.",
            )
        return self
