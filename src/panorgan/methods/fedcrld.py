"""FedCRLD — each site's own encoder looks up in the common one what suits its scans, and remembers its own history.

Qi et al., MICCAI 2022. A site has two encoders: the global one is averaged, its own is not. Self-attention over the own
bottleneck features, then cross-attention from these (queries) to the global ones (keys, values), locate what the
federation knows about the scan; both go into the decoder, with the skip connections of the own encoder. *Contrastive
re-localisation* pulls the two encoders' features together. *History distillation* holds predictions and features to a
momentum model, a running mean of the site's own models, so that the average of a round does not undo its progress.

- The paper leaves much to its code, and UFPS, whose baseline this is, changed some of it. Own here are the encoders
  alone, as in UFPS: a decoder for each site, as in the code, could not learn organs that the site does not label.
- Re-localisation is the symmetric KL divergence between both encoders' features, a softmax over channels, the mean
  over voxels; in the code the softmax is over an axis of space, and the mean over all numbers.
- Values of the cross-attention are global features, as keys are; in the code they are own ones.
- Predictions are held to the history by their squared difference, as in UFPS (cross-entropy in the code).
- The momentum model follows after every step and stays at its site; it begins as the first model received there.
- A site's own encoder begins with the first weights of the global one, that of a late site with weights newly drawn.
  As in `fedbn`, the delivered model holds those of all sites and trusts each on the organs that its site annotates;
  every site's own network is scored too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from panorgan.methods.base import Federation, SiteRule, published
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.registry import register
from panorgan.methods.shared.memory import Remembers
from panorgan.methods.shared.site_parts import NetworkWithSiteParts, SitePartsMethod, SitePartsServer
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.networks.blocks import decode, encode
from panorgan.preparation.batch import Batch

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits, and the deepest features of the global and of the own encoder."""


class FedCRLDConfig(FedAvgConfig):
    """Weights of the three losses that are added, and the memory of the momentum model."""

    relocalisation: float = published(1.0, "1 (released code)", "weight of the divergence between both encoders", ge=0)
    history: float = published(0.2, "0.2 (released code)", "weight of the difference from past predictions", ge=0)
    history_features: float = published(1.0, "1 (released code)", "weight of the difference from past features", ge=0)
    momentum: float = published(
        0.9, "0.5 or 0.9 (released code)", "share of earlier models in the momentum model, per step", ge=0, lt=1
    )


class Attention(nn.Module):
    """Features take over from others what resembles them: softmax(QKᵀ/√d)·V, added and normalised."""

    def __init__(self, width: int, dimensions: int) -> None:
        super().__init__()
        convolution = nn.Conv3d if dimensions == 3 else nn.Conv2d
        inner = max(1, width // 2)
        self.queries, self.keys, self.values = (convolution(width, inner, 1) for _ in range(3))
        self.out, self.norm = convolution(inner, width, 1), nn.GroupNorm(1, width)

    def forward(self, features: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """[B, F, *S], [B, F, *S] → [B, F, *S]."""
        projected = (self.queries(features), self.keys(others), self.values(others))
        tokens = [one.flatten(2).transpose(1, 2)[:, None] for one in projected]  # one head: ONNX asks for that axis
        found = F.scaled_dot_product_attention(*tokens)[:, 0].transpose(1, 2).unflatten(2, features.shape[2:])
        out: torch.Tensor = self.norm(features + self.out(found))
        return out


class TwoEncoders(NetworkWithSiteParts):
    """A U-Net with a second encoder, of each site's own, that attends to the first."""

    def __init__(self, settings: UNetSettings, federation: Federation, site: str | None) -> None:
        super().__init__(settings, federation, site)
        width = settings.features[-1]
        self.own_encoder, self.own_bottleneck = copy.deepcopy(self.encoder), copy.deepcopy(self.bottleneck)
        self.separate([*(f"own_encoder.{level}" for level in range(len(self.encoder))), "own_bottleneck"])
        self.to_itself, self.to_global = (Attention(width, settings.dimensions) for _ in range(2))
        self.fusion = (nn.Conv3d if settings.dimensions == 3 else nn.Conv2d)(2 * width, width, 1)
        self.outputs: Outputs | None = None
        """Of the last pass in training, for the losses that need more than logits."""

    def predict(self, image: torch.Tensor) -> torch.Tensor:
        """Logits with the chosen site's encoder."""
        logits, common, own = self.run_pass("outputs", self.compute, image)
        self.outputs = (logits, common, own) if self.training else None
        return logits

    def compute(self, image: torch.Tensor) -> Outputs:
        """Both encoders, attention, the decoder."""
        common = encode(self.encoder, self.bottleneck, image)[-1]
        *skips, own = encode(self.own_encoder, self.own_bottleneck, image)
        refined = self.to_itself(own, own)
        located = self.to_global(refined, common)
        deepest = self.fusion(torch.cat((refined, located), dim=1))
        return self.head(decode(self.decoder, [*skips, deepest])), common, own


@register("fedcrld", config=FedCRLDConfig)
class FedCRLD(SitePartsMethod):
    """FedAvg with a second encoder of each site's own, cross-attention between the two, and a memory."""

    paper: ClassVar[str] = (
        "Qi et al., Contrastive Re-localization and History Distillation in Federated CMR Segmentation "
        "(MICCAI 2022), doi:10.1007/978-3-031-16443-9_25"
    )
    equations: ClassVar[Mapping[str, str]] = {
        "cross-attention": "`TwoEncoders.compute`",
        "contrastive re-localisation": "`divergence`",
        "momentum distillation": "`Site.loss`, `Site.step`",
    }

    class Site(Remembers, SiteRule):
        """Local steps on the partial loss and three more."""

        memory: ClassVar[Mapping[str, str]] = {"history": "history/"}
        config: FedCRLDConfig
        model: TwoEncoders
        history: dict[str, torch.Tensor]
        """Weights of the momentum model."""
        past: TwoEncoders | None = None
        """The momentum model, during a round."""

        def before_round(self) -> None:
            """Set up the momentum model."""
            super().before_round()
            self.past = copy.deepcopy(self.model).requires_grad_(False).eval()
            if self.history:
                self.past.load_state_dict(self.history)

        def step(self, batch: Batch) -> dict[str, torch.Tensor]:
            """A step, which the momentum model follows."""
            logged = super().step(batch)
            assert self.past is not None
            current = self.model.state_dict()
            for key, past in self.past.state_dict().items():
                mean = past.is_floating_point()
                past.copy_(current[key].lerp(past, self.config.momentum) if mean else current[key])
            return logged

        def loss(self, batch: Batch) -> torch.Tensor:
            """The partial loss, re-localisation, and both differences from the momentum model."""
            loss = super().loss(batch)
            assert self.past is not None
            assert self.model.outputs is not None
            (logits, common, own), self.model.outputs = self.model.outputs, None
            with torch.no_grad():
                past_logits, past_common, past_own = self.past.compute(batch.image)
            softmax = self.model.activation == "softmax"
            now, then = (x.float().softmax(1) if softmax else x.float().sigmoid() for x in (logits, past_logits))
            features = F.mse_loss(common, past_common) + F.mse_loss(own, past_own)
            return (
                loss
                + self.config.relocalisation * divergence(common, own)
                + self.config.history * F.mse_loss(now, then)
                + self.config.history_features * features
            )

        def after_round(self) -> None:
            """Keep the momentum model."""
            super().after_round()
            if self.past is not None:
                self.history, self.past = self.past.state_dict(), None

    class Server(SitePartsServer):
        """Averages everything but the sites' own encoders."""

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> SegmentationNetwork:
        """With the encoders of all sites; at a site, with its own."""
        return TwoEncoders(self.network_settings(settings), federation, site)


def divergence(common: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """(KL(p‖q) + KL(q‖p))/2 of features [B, F, *S], a softmax over F, the mean over samples and voxels."""
    p, q = (features.float().log_softmax(dim=1) for features in (common, own))
    return ((p.exp() - q.exp()) * (p - q)).sum(dim=1).mean() / 2
