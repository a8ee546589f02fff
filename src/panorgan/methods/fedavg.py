"""FedAvg — every site trains on what it annotates, the server averages. arXiv:1602.05629

The site's loss covers annotated structures only, so organs that a site does not label are not taught as background.

Three things differ from the paper, because sites here label different organs. Voxels that a site's annotation leaves
open are decided by the model that it received (see `losses.expected`; with `unlabelled: marginal`, by the model in
training). An organ's output row is averaged over the sites that annotate it (`organ_parts: everyone` averages it over
all). And the server steps beyond the mean where the sites' updates disagree (`server_step: 1` is the plain mean); see
`server_average`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from panorgan.methods.base import Method, MethodConfig, ServerRule, SiteRule, published
from panorgan.methods.registry import register


class FedAvgConfig(MethodConfig):
    """FedAvg has no settings of its own."""

    weighting: Literal["cases", "uniform"] = published("cases", "cases", "a site's weight in the mean: n_i, or 1")
    unlabelled: Literal["received", "marginal"] = published(
        "received",
        "every organ is labelled",
        "which model decides the voxels that the annotation leaves open: the one received in this round (EM), or the "
        "one in training (marginal loss)",
    )


@register("fedavg", config=FedAvgConfig)
class FedAvg(Method):
    """The weighted mean of all weights after local training on partial labels."""

    paper: ClassVar[str] = "arXiv:1602.05629"
    equations: ClassVar[Mapping[str, str]] = {
        "Algorithm 1, at the server": "`Server.aggregate`: Σ n_i·w_i / Σ n_i",
        "Algorithm 1, at a site": "`Site.step`; the partial loss in it is not from this paper",
    }

    class Site(SiteRule):
        """Inherited: local steps on the partial Dice + cross-entropy loss."""

    class Server(ServerRule):
        """Inherited: per key, Σ n_i·w_i / Σ n_i; an organ's output row over its owners, then FedExP's step."""
