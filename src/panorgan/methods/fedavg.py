"""FedAvg — every site trains on what it annotates, the server averages. arXiv:1602.05629

The site's loss covers annotated structures only, so organs that a site does not label are not taught as background.
"""

from __future__ import annotations

from panorgan.methods.base import Method, MethodConfig, ServerRule, SiteRule
from panorgan.methods.registry import register


class FedAvgConfig(MethodConfig):
    """FedAvg has no numbers of its own."""


@register("fedavg", config=FedAvgConfig)
class FedAvg(Method):
    """Weighted average of all weights after local training on partial labels."""

    class Site(SiteRule):
        """Inherited: local steps on the partial Dice + cross-entropy loss."""

    class Server(ServerRule):
        """Inherited: per key, Σ n_i·w_i / Σ n_i."""
