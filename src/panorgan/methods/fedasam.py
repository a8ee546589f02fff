"""FedASAM — sharpness-aware local steps, and the mean of late global models. arXiv:2203.11834

A site steps by the gradient at the worst point nearby instead of the one where it stands (ASAM, arXiv:2102.11600): it
looks for minima that are flat. A step costs two. From three quarters of the run on, the server averages the global
models over rounds (SWA, arXiv:1803.05407); that mean is validated and delivered, while sites go on from the last model.
With `training.select: best`, a round before that is delivered if it scored better.

The default numbers are those with which UFPS ran FedASAM on CT. Two things differ from what the authors of FedASAM
released: there the local learning rate falls anew in every cycle of SWA, here the experiment's schedule holds; there
biases are not scaled (T = 1), here T = |w| + η for every weight, as the formula says and as in UFPS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from panorgan.methods.base import SiteRule, published
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.registry import register
from panorgan.methods.shared.sharpness import asam_step
from panorgan.methods.shared.swa import AveragesRounds, SWAMethod, SWASettings
from panorgan.preparation.batch import Batch
from panorgan.settings import Settings


class ASAMSettings(Settings):
    """ASAM's two numbers."""

    rho: float = published(
        0.7,
        "0.7 (CIFAR-10)",
        "how far the worst point is looked for, ρ, in the scale of the weights; 0 for plain steps",
        ge=0,
    )
    eta: float = published(
        0.001,
        "0.2 (CIFAR-10)",
        "what is added to the size of a weight to make its scale, η: those near zero can move too",
        ge=0,
    )


class FedASAMConfig(SWASettings, ASAMSettings, FedAvgConfig):
    """FedAvg's numbers, ASAM's two and SWA's two."""


class ASAMSite(SiteRule):
    """Two gradients on the same batch, one step. Teachers are trained by plain steps."""

    config: FedASAMConfig

    def step(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Up along the gradient, take another there, step with it from where it began."""
        if not self.in_training:
            return super().step(batch)
        self.prepare(batch)
        return {"loss": asam_step(self, batch, self.config.rho, self.config.eta)}


@register("fedasam", config=FedASAMConfig)
class FedASAM(SWAMethod):
    """FedAvg in search of flat minima: ASAM at the sites, SWA at the server."""

    paper: ClassVar[str] = "arXiv:2203.11834"
    equations: ClassVar[Mapping[str, str]] = {
        "ASAM, at a site": "`Site.step`: g at w + ρ·T²g/‖Tg‖, T = |w| + η",
        "SWA, at the server": "`Server.aggregate`: m + (w − m)/n at the end of a cycle, see `swa`; `Server.delivered`",
    }

    class Site(ASAMSite):
        """Sharpness-aware steps on the partial loss."""

    class Server(AveragesRounds):
        """The weighted mean of FedAvg, and over late rounds the mean of those."""
