"""SegViz — all sites share a representation block; every organ keeps a task block of its own.

Kanhere et al., "Privacy-Preserving Collaboration for Multi-Organ Segmentation via Federated Learning from Sites with
Partial Labels". The *representation block* is the U-Net without its last two convolutions; the server averages it,
unweighted, after every round (`training.local_epochs: 10` in the paper). The *task block* is those two convolutions.
A task block is averaged only over the sites that annotate its organ; a site sends only those of its own organs. The
delivered model is one representation block with all task blocks attached.

In the paper a site has its own task blocks only, so local training ignores what other sites' task blocks need: with
little data, the representation drifts away from them, and organs get lost. Here a site also receives the others' task
blocks, frozen, and distils their predictions from the start of the round (`unlabelled: marginal` is the paper's way).
Either way a site with a new organ may join at any round: it receives the representation block and brings a task block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from panorgan.methods.base import Method, MethodConfig, Payload, ServerRule, SiteRule, Stage, published
from panorgan.methods.registry import register
from panorgan.networks.organ_parts import group_of_key
from panorgan.networks.settings import OrganParts

FINETUNE = "finetune"


class SegVizConfig(MethodConfig):
    """SegViz's settings."""

    weighting: Literal["cases", "uniform"] = published("uniform", "uniform", "a site's weight in the mean: n_i, or 1")
    unlabelled: Literal["received", "marginal"] = published(
        "received",
        "marginal",
        "whether a site distils the organs that it does not label: from the other sites' frozen task blocks, as they "
        "predict at the start of the round; or not at all",
    )
    finetune_rounds: int = published(
        0, "0", "rounds at the end in which only task blocks train, on the frozen representation block", ge=0
    )


@register("segviz", config=SegVizConfig)
class SegViz(Method):
    """Selective weight synchronisation: a shared representation block, and a task block per organ."""

    group: ClassVar[str] = "systems"
    paper: ClassVar[str] = (
        "Kanhere et al., Privacy-Preserving Collaboration for Multi-Organ Segmentation via Federated Learning from "
        "Sites with Partial Labels"
    )
    equations: ClassVar[Mapping[str, str]] = {
        "section 3.4, representation block": "everything but `task_blocks`; `Server.aggregate`, unweighted (and "
        "`server_step: 1`)",
        "section 3.4, task block": "`task_blocks.<organ>`: the last two convolutions; averaged over owners only",
        "section 3.4, final model": "`build_network`: all task blocks on one representation block",
    }
    recipe: ClassVar[Mapping[str, object]] = {
        "method.ce_weight": 0,
        "method.server_step": 1,
        "method.unlabelled": "marginal",
        "network.features": [16, 32, 64, 128, 256],
        "network.residual": True,
        "network.norm": "batch",
        "plan.spacing_mm": [1.5, 1.5, 2.0],
        "training.rounds": 50,
        "training.local_epochs": 10,
        "training.optimizer.learning_rate": 0.0001,
        "training.optimizer.weight_decay": 0,
        "training.optimizer.schedule": "cosine",
        "training.sampling.patch_size": [128, 128, 32],
        "training.sampling.batch_size": 2,
        "training.sampling.foreground": 1,
    }
    organs: ClassVar[OrganParts] = "task_blocks"

    class Site(SiteRule):
        """Local steps on the partial loss of its own organs; the others' task blocks are frozen and distilled."""

        def before_round(self) -> None:
            """Load the received weights; when fine-tuning, freeze the representation block."""
            super().before_round()
            for name, module in self.model.named_modules():
                if self.tuning and name and group_of_key(f"{name}.") is None:
                    module.eval()  # its statistics are frozen too

        @property
        def tuning(self) -> bool:
            """Whether only task blocks train."""
            return self.round_info.stage == FINETUNE

        @property
        def held_organs(self) -> tuple[str, ...]:
            """None when fine-tuning: the representation that the others' task blocks read does not change then."""
            return () if self.tuning else super().held_organs

        def trains(self, parameter: str) -> bool:
            """When fine-tuning, only the own task blocks."""
            return super().trains(parameter) and not (self.tuning and group_of_key(parameter) is None)

        def update(self) -> Payload:
            """The weights that it trained: when fine-tuning, only task blocks."""
            whole = super().update()
            if not self.tuning:
                return whole
            return Payload({k: v for k, v in whole.tensors.items() if group_of_key(k) is not None}, whole.scalars)

    class Server(ServerRule):
        """Inherited: per key the unweighted mean over the sites that sent it. Task blocks come from owners only."""

        def expects(self, site: str) -> Mapping[str, torch.Tensor]:
            """Representation block and own task blocks; when fine-tuning, those only."""
            whole = super().expects(site)
            if self.round_info.stage != FINETUNE:
                return whole
            return {key: value for key, value in whole.items() if group_of_key(key) is not None}

    def stages(self, rounds: int) -> tuple[Stage, ...]:
        """Training, then the fine-tuning rounds if there are any."""
        assert isinstance(self.config, SegVizConfig)
        train = Stage("train", rounds)
        return (train, Stage(FINETUNE, self.config.finetune_rounds)) if self.config.finetune_rounds else (train,)
