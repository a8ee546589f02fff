"""FedASAM — sharpness-aware local steps, and the mean of late global models. arXiv:2203.11834

A site steps by the gradient at a perturbed point, the worst one within a radius (ASAM, arXiv:2102.11600), which favours
flat minima. A step costs two. From three quarters of the run on, the server averages the global models over rounds
(SWA, arXiv:1803.05407); that mean is validated and delivered, while sites continue from the last model. With
`training.select: best`, an earlier round is delivered if it scored better.

The default values are those with which UFPS ran FedASAM on CT. Two things differ from the code released with FedASAM:
there the local learning rate restarts in every cycle of SWA, here the experiment's schedule applies; there biases are
not scaled (T = 1), here T = |w| + η for every weight, as the formula says and as in UFPS.
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
    """The two settings of ASAM."""

    rho: float = published(
        0.7,
        "0.7 (CIFAR-10)",
        "radius of the perturbation, ρ, in the scale of the weights; 0 for plain steps",
        ge=0,
    )
    eta: float = published(
        0.001,
        "0.2 (CIFAR-10)",
        "added to the magnitude of a weight to make its scale, η, so that weights near zero can move too",
        ge=0,
    )


class FedASAMConfig(SWASettings, ASAMSettings, FedAvgConfig):
    """The settings of FedAvg, ASAM and SWA."""


class ASAMSite(SiteRule):
    """Two gradients on the same batch, one step. Teachers are trained by plain steps."""

    config: FedASAMConfig

    def step(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Ascend along the gradient, take the gradient there, step with it from the starting point."""
        if not self.in_training:
            return super().step(batch)
        self.prepare(batch)
        return {"loss": asam_step(self, batch, self.config.rho, self.config.eta)}


@register("fedasam", config=FedASAMConfig)
class FedASAM(SWAMethod):
    """FedAvg towards flat minima: ASAM at the sites, SWA at the server."""

    paper: ClassVar[str] = "arXiv:2203.11834"
    equations: ClassVar[Mapping[str, str]] = {
        "ASAM, at a site": "`Site.step`: g at w + ρ·T²g/‖Tg‖, T = |w| + η",
        "SWA, at the server": "`Server.aggregate`: m + (w − m)/n at the end of a cycle, see `swa`; `Server.delivered`",
    }

    class Site(ASAMSite):
        """Sharpness-aware steps on the partial loss."""

    class Server(AveragesRounds):
        """The weighted mean of FedAvg, averaged over late rounds."""
