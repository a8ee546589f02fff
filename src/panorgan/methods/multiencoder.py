"""Multi-encoder FedAvg — an encoder per organ, which only the sites that annotate it train, and one decoder for all.

Every organ takes a pass of its own through the decoder, so it costs as much as a network for each.
"""

from __future__ import annotations

from typing import ClassVar

from panorgan.methods.base import Method, MethodConfig, ServerRule, SiteRule
from panorgan.methods.registry import register
from panorgan.networks.settings import OrganParts


class MultiEncoderConfig(MethodConfig):
    """No numbers of its own."""


@register("multiencoder", config=MultiEncoderConfig)
class MultiEncoder(Method):
    """A whole encoder per organ, shared decoder."""

    paper: ClassVar[str] = "FLKD's comparison 'Sep. Enc' (its Fig. 3B)"
    organs: ClassVar[OrganParts] = "encoders"

    class Site(SiteRule):
        """Inherited: local steps on the partial loss; its network has encoders for its own organs only."""

    class Server(ServerRule):
        """Inherited: an encoder's weights are averaged over the sites that send them, its owners."""
