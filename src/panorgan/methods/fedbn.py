"""FedBN — every site has its own normalisation layers, everything else is averaged. arXiv:2102.07623

Hospitals' scans differ in contrast, noise and field of view, and normalisation layers carry much of that difference. In
the paper they never leave their site. Here each site's own come to the server with the rest of its network, which
neither averages them nor sends them to another site in training, so that one model can be delivered: it holds those of
all sites. A site's own network is scored too, as in the paper.

- The layers are all those of the network, with whatever they hold: scale and shift, and of batch normalisation the
  running statistics. Instance and group normalisation have no statistics, so that less stays apart than in the paper.
- The delivered model predicts an organ with the layers of the sites that annotate it, as UFPS does where it compares
  with FedBN; so does a hospital outside, which has none of its own.
- A site that joins late begins with its layers as they are initialised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from panorgan.methods.base import Federation, SiteRule
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.registry import register
from panorgan.methods.shared.site_parts import NetworkWithSiteParts, SitePartsMethod, SitePartsServer
from panorgan.networks import SegmentationNetwork, UNetSettings


class FedBNConfig(FedAvgConfig):
    """FedBN has no settings of its own."""


@register("fedbn", config=FedBNConfig)
class FedBN(SitePartsMethod):
    """FedAvg whose sites have their own normalisation layers."""

    paper: ClassVar[str] = "arXiv:2102.07623"
    equations: ClassVar[Mapping[str, str]] = {"Algorithm 1": "`Server.aggregate`: the mean of all other layers"}

    class Site(SiteRule):
        """Inherited: local steps on the partial loss, in a network with the site's own normalisation layers."""

    class Server(SitePartsServer):
        """Averages everything but normalisation layers."""

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> SegmentationNetwork:
        """A U-Net with one set of normalisation layers for each site; at a site, its own."""
        network = NetworkWithSiteParts(self.network_settings(settings), federation, site)
        network.separate(dict.fromkeys(key.rpartition(".")[0] for key in network.parts()["norm"]))
        return network
