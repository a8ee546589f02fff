"""Methods that are compositions of pieces: the choices along each axis, and one table of presets.

A new one is a new row of `PRESETS`; a new choice is a `Piece` whose rules call `super()` (see `composition`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from panorgan.anatomy import Vocabulary
from panorgan.data.labels import Activation
from panorgan.losses import partial_dice_ce
from panorgan.losses.exclusion import exclusion
from panorgan.losses.leaf_dice import leaf_dice
from panorgan.methods.base import Method, MethodConfig, SiteRule, published
from panorgan.methods.dodnet import DoDNet
from panorgan.methods.fedadamw import FedAdamW
from panorgan.methods.fedalign import FedAlign
from panorgan.methods.fedasam import ASAMSettings, ASAMSite, FedASAM
from panorgan.methods.feddyn import FedDyn
from panorgan.methods.fedexp import FedExP
from panorgan.methods.fedopt import FedAdam, FedYogi
from panorgan.methods.fedprox import FedProx, ProximalSettings, ProximalSite
from panorgan.methods.moon import Moon
from panorgan.methods.scaffold import Scaffold
from panorgan.methods.shared.composition import PARTIAL_LABELS, PLAIN, Piece, Preset, register_preset
from panorgan.methods.shared.server_momentum import MomentumServer, MomentumSettings
from panorgan.methods.shared.starred import PSEUDO_LABELS, starred
from panorgan.methods.shared.swa import AveragesRounds, SWAMethod, SWASettings
from panorgan.networks.settings import OrganParts
from panorgan.preparation.batch import Batch
from panorgan.settings import Settings


class HeldPartsConfig(MethodConfig):
    """Parts of single organs; a site distils the frozen parts of other organs that it received in the round."""

    unlabelled: Literal["received", "marginal"] = published(
        "received",
        "marginal",
        "whether a site distils the organs that it does not label: from the other sites' frozen parts, as they "
        "predict at the start of the round; or not at all",
    )


class ReceivedConfig(MethodConfig):
    """The received model decides what is left open, as in FedAvg; the server takes the plain mean."""

    unlabelled: Literal["received", "marginal"] = Field(
        "received", description="which model decides the voxels that the annotation leaves open, see `fedavg`"
    )
    server_step: Literal[1] = Field(1, description="momentum takes the place of a longer step")


class MarginalConfig(MethodConfig):
    """Partial labels as in most of the literature: the model in training decides what is left open, all weights are
    averaged over all sites, and the server takes the plain mean."""

    unlabelled: Literal["marginal"] = Field("marginal", description="unlabelled organs are merged into the background")
    organ_parts: Literal["everyone"] = Field("everyone", description="every site averages every output row")
    server_step: Literal[1] = Field(1, description="the plain mean")


class ExclusionSettings(Settings):
    """The setting of the exclusion loss."""

    exclusion_weight: float = Field(1.0, ge=0, description="weight of the exclusion loss")


class ExclusionConfig(ExclusionSettings, MarginalConfig):
    """Marginal and exclusion loss."""


class LeafDiceConfig(MarginalConfig):
    """The same, with a Dice loss of label sets."""

    leaf_exponent: Literal[1, 2] = Field(2, description="exponent α of the probabilities in the denominator")
    dice_over: Literal["sample"] = Field("sample", description="sums of the Dice loss: per sample")


class SoftmaxChannels(Method):
    """One softmax over background and all organs, regardless of the experiment."""

    group: ClassVar[str] = "losses"
    organs: ClassVar[OrganParts | None] = "channels"
    activation: ClassVar[Activation | None] = "softmax"


class MarginalAndExclusion(SiteRule):
    """Marginal Dice + cross-entropy, and exclusion Dice + cross-entropy."""

    config: ExclusionConfig

    def supervised(
        self, logits: torch.Tensor, vocabulary: Vocabulary, batch: Batch, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Both, per sample."""
        loss = super().supervised(logits, vocabulary, batch, received)
        excluded = exclusion(logits, batch, vocabulary, self.config.dice_weight, self.config.ce_weight)
        return loss + self.config.exclusion_weight * excluded


class LeafDice(SiteRule):
    """Leaf-Dice and marginal cross-entropy."""

    config: LeafDiceConfig

    def supervised(
        self, logits: torch.Tensor, vocabulary: Vocabulary, batch: Batch, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Both, per sample."""
        dice = leaf_dice(logits, batch, vocabulary, self.config.leaf_exponent)
        entropy = partial_dice_ce(
            logits, batch, vocabulary, "softmax", dice_weight=0.0, ce_weight=self.config.ce_weight
        )
        return self.config.dice_weight * dice + entropy


class UnlabelledIsBackground(SiteRule):
    """Treats every unknown organ as absent."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """The ordinary loss, with unknown organs labelled as background."""
        return super().loss(batch.assuming_unknown_is_absent())


class WithheldLabels(Method):
    """Trains on the withheld full labels; with every organ annotated, the partial loss is the ordinary one."""

    group: ClassVar[str] = "bounds"
    labels: ClassVar[Literal["annotated", "withheld"]] = "withheld"


# Supervision; PARTIAL_LABELS is the plain one.
HELD_PARTS = Piece(HeldPartsConfig)
WITHHELD_LABELS = Piece(MethodConfig, method=WithheldLabels)
RECEIVED = Piece(ReceivedConfig)
UNLABELLED_AS_BACKGROUND = Piece(MethodConfig, UnlabelledIsBackground)
TARGET_ADAPTIVE = Piece(MarginalConfig, method=SoftmaxChannels)
LABEL_SETS = Piece(LeafDiceConfig, LeafDice, method=SoftmaxChannels)
MARGINAL_AND_EXCLUSION = Piece(ExclusionConfig, MarginalAndExclusion, method=SoftmaxChannels)
# Local step; PLAIN is the optimiser's own.
PROXIMAL = Piece(ProximalSettings, ProximalSite)
ASAM = Piece(ASAMSettings, ASAMSite)
CONTROL_VARIATES = Piece(site=Scaffold.Site, server=Scaffold.Server, method=Scaffold)
# Server average; PLAIN is the mean over sites.
SWA = Piece(SWASettings, server=AveragesRounds, method=SWAMethod)
MOMENTUM = Piece(MomentumSettings, server=MomentumServer)

_UFPS = (
    "Jiang et al., UFPS: A unified framework for partially annotated federated segmentation in heterogeneous data "
    "distribution"
)
_FLKD = (
    "Kim et al., Federated learning with knowledge distillation for multi-organ segmentation with partially labeled "
    "datasets"
)
_SEGVIZ = (
    "Kanhere et al., Privacy-Preserving Collaboration for Multi-Organ Segmentation via Federated Learning from Sites "
    "with Partial Labels"
)

PRESETS: tuple[Preset, ...] = (
    # -- on pseudo labels: UFPS's starred baselines
    Preset(
        "fedavg_pl",
        title="FedAvg*",
        description="FedAvg on pseudo labels: UFPS without its modules, and the first of its starred baselines.",
        summary="Weighted average after local training on all organs, labelled by the annotation or by the others' "
        "teachers.",
        paper="FedAvg* in Jiang et al., UFPS",
        equations={"eq. 4": "`Site.prepare`: `losses.unified_label.merge`"},
        supervision=PSEUDO_LABELS,
    ),
    # -- with parts of the network for single organs; only the sites that annotate an organ train and send its part
    Preset(
        "multihead",
        title="Multi-head FedAvg",
        description="one U-Net for all, a small head per organ, which only the sites that annotate it train.\n\n"
        "The baseline of FLKD. There all heads are averaged over all sites, also over those that never touch them, and "
        "nothing\nholds the features to what the other heads need, so that organs get lost; to have it so: "
        "`organ_parts: everyone`,\n`weighting: uniform` and `unlabelled: marginal`.",
        summary="Shared encoder and decoder, a head of 162 parameters per organ.",
        paper="the baseline of FLKD (see there), section 3.5",
        supervision=HELD_PARTS,
        group="networks",
        organs="heads",
    ),
    Preset(
        "multidecoder",
        title="Multi-decoder FedAvg",
        description="one encoder for all, a decoder per organ, which only the sites that annotate it train.",
        summary="Shared encoder, a whole decoder per organ.",
        paper="after Med3D, arXiv:1904.00625",
        group="networks",
        organs="decoders",
    ),
    Preset(
        "multiencoder",
        title="Multi-encoder FedAvg",
        description="an encoder per organ, which only the sites that annotate it train, and one decoder for all.\n\n"
        "Every organ takes a pass of its own through the decoder, so it costs as much as a network for each.",
        summary="A whole encoder per organ, shared decoder.",
        paper="FLKD's comparison 'Sep. Enc' (its Fig. 3B)",
        group="networks",
        organs="encoders",
    ),
    # -- partial labels in one output for all organs
    Preset(
        "tal",
        title="Target-adaptive loss",
        description="FedAvg whose sites merge the organs that they do not label into the background, for the loss "
        "alone. What a merged\nvoxel is, the model in training decides.",
        summary="Unlabelled organs merged into the background, plain mean.",
        paper="PIPO-FAN, arXiv:2001.00208",
        equations={"section III-C": "`Site.loss`: `losses.partial`, cross-entropy of summed probabilities"},
        supervision=TARGET_ADAPTIVE,
    ),
    Preset(
        "meloss",
        title="Marginal and exclusion loss",
        description="the target-adaptive loss, and exclusion: an organ without a label is not where another one is "
        "outlined.",
        summary="Unlabelled organs merged into the background and kept off labelled ones, plain mean.",
        paper="arXiv:2007.03868",
        equations={
            "marginal Dice and cross-entropy": "`losses.partial`",
            "exclusion Dice and cross-entropy": "`losses.exclusion`",
        },
        supervision=MARGINAL_AND_EXCLUSION,
    ),
    Preset(
        "leafdice",
        title="Leaf-Dice",
        description="FedAvg on a Dice loss of label sets: a voxel that may be background or an unlabelled organ counts "
        "for no\nclass, and against those that are labelled.\n\n"
        "The cross-entropy with it is the marginal one, as in `tal`. A class that a patch does not show by itself "
        "adds a\nconstant: nothing pushes it to 0.",
        summary="Dice over voxels whose class is known, marginal cross-entropy, plain mean.",
        paper="arXiv:2107.03846",
        equations={"leaf-Dice": "`losses.leaf_dice`", "marginal cross-entropy": "`losses.partial`"},
        supervision=LABEL_SETS,
    ),
    # -- server averages
    Preset(
        "fedavgm",
        title="FedAvgM",
        description="FedAvg with momentum at the server.",
        summary="Weighted average that goes on in the direction of earlier rounds.",
        paper="arXiv:1909.06335",
        equations={"v ← β·v + Δ": "`Server.step_along`"},
        supervision=RECEIVED,
        average=MOMENTUM,
    ),
    # -- bounds: all labels, or all cases in one place
    Preset(
        "fed_full",
        title="FedAvg, fully labelled",
        description="FedAvg where every site has all labels: what is lost by averaging alone, without missing labels. "
        "Possible only on a\nbenchmark.",
        summary="Weighted average after local training on all labels, withheld ones included.",
        paper="arXiv:1602.05629",
        supervision=WITHHELD_LABELS,
    ),
    Preset(
        "central_full",
        title="Central, fully labelled",
        description="all cases in one place with all labels: the upper bound, possible only on a benchmark.",
        summary="Pooled cases, all labels, withheld ones included.",
        paper=f"{_UFPS} (its upper bound, 'Centralized')",
        supervision=WITHHELD_LABELS,
        data="pooled",
    ),
    Preset(
        "central_partial",
        title="Central, partially labelled",
        description="all cases in one place, each with its own site's labels, and the partial loss.",
        summary="Pooled cases, partial labels, unknown organs left out of the loss.",
        paper=f"{_FLKD} (its comparison 'Multihead - centralized setting', here with `network.organs: heads`)",
        equations={"eq. 3": "`Site.loss`: cross-entropy + Dice on what is annotated"},
        group="bounds",
        data="pooled",
    ),
    Preset(
        "central_naive",
        title="Central, naive",
        description="all cases in one place, and whatever a case does not label is taught as background.\n\n"
        'What happens when partially labelled sets are simply thrown together: the same liver is "liver" in one case '
        'and\n"background" in the next.',
        summary="Pooled cases, unlabelled organs treated as background.",
        paper=f"{_SEGVIZ} (its comparison 'Central Aggregation', section 3.5.2)",
        supervision=UNLABELLED_AS_BACKGROUND,
        group="bounds",
        data="pooled",
    ),
)

_FEDAVGM = next(preset for preset in PRESETS if preset.name == "fedavgm")

PRESETS += (
    # -- plain rules on pseudo labels
    starred(FedProx, "FedProx", "with local steps that may not wander far", in_ufps=True),
    starred(Moon, "MOON", "whose sites' features stay near those of the global model", in_ufps=True),
    starred(FedAlign, "FedAlign", "whose deepest block is held to a narrower copy of itself", in_ufps=True),
    starred(FedASAM, "FedASAM", "in search of flat minima: ASAM at the sites, SWA at the server", in_ufps=True),
    starred(Scaffold, "SCAFFOLD", "with control variates against client drift"),
    starred(FedDyn, "FedDyn", "with dynamic regularisation"),
    starred(FedAdamW, "FedAdamW", "with local AdamW steps whose second moments, and direction, sites share"),
    starred(FedExP, "FedExP", "with extrapolation at the server, as published"),
    starred(_FEDAVGM, "FedAvgM", "with momentum at the server"),
    starred(FedAdam, "FedAdam", "whose server takes Adam's steps"),
    starred(FedYogi, "FedYogi", "whose server takes Yogi's steps"),
    starred(
        DoDNet,
        "DoDNet",
        "of a network with dynamic heads",
        "All organs are labelled, so every site asks for all of them, and their outputs share one softmax; that of the "
        "background is 0.\nUFPS's DOD* is another adaptation: there a site keeps everything but the encoder, and no "
        "teachers help.",
        axis="architecture",
    ),
)

for _preset in PRESETS:
    register_preset(_preset, __name__)

__all__ = [
    "ASAM",
    "CONTROL_VARIATES",
    "PARTIAL_LABELS",
    "PLAIN",
    "PRESETS",
    "PROXIMAL",
    "PSEUDO_LABELS",
    "SWA",
    "UNLABELLED_AS_BACKGROUND",
    "WITHHELD_LABELS",
]
