"""FedASAM* — FedASAM on pseudo labels, the strongest of UFPS's starred baselines. See `fedasam`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from panorgan.cases.sampling import Batch
from panorgan.methods.asam_step import asam_step
from panorgan.methods.fedasam import FedASAMConfig
from panorgan.methods.pseudo_labels import PseudoLabelConfig, PseudoLabelMethod, PseudoLabelServer, PseudoLabelSite
from panorgan.methods.registry import register
from panorgan.methods.swa import AveragesRounds, first_average


class FedASAMPLConfig(PseudoLabelConfig, FedASAMConfig):
    """Those of the pseudo labels, and ASAM's and SWA's."""


@register("fedasam_pl", config=FedASAMPLConfig)
class FedASAMPL(PseudoLabelMethod):
    """FedAvg* in search of flat minima: ASAM at the sites, SWA at the server."""

    paper: ClassVar[str] = "FedASAM* in Jiang et al., UFPS; arXiv:2203.11834"
    equations: ClassVar[Mapping[str, str]] = {
        "ASAM, at a site": "`Site.step`: g at w + ρ·T²g/‖Tg‖, T = |w| + η",
        "SWA, at the server": "`Server.aggregate`: m + (w − m)/n at the end of a cycle, see `swa`; `Server.delivered`",
    }

    config: FedASAMPLConfig

    def module_starts(self, rounds: int) -> Mapping[str, int]:
        """SWA is the only one that waits."""
        return first_average(self.config.swa_start, self.config.swa_cycle, rounds)

    class Site(PseudoLabelSite):
        """Two gradients on the same batch and label, one step. Teachers are trained by plain steps."""

        config: FedASAMPLConfig

        def step(self, batch: Batch) -> dict[str, torch.Tensor]:
            """Up along the gradient, take another there, step with it from where it began."""
            if not self.in_training:
                return super().step(batch)
            self.prepare(batch)
            return {"loss": asam_step(self, batch, self.config.rho, self.config.eta)}

    class Server(AveragesRounds, PseudoLabelServer):
        """The exchange of teachers, FedAvg's mean, and over late rounds the mean of those."""
