"""Multi-decoder FedAvg — one encoder for all, a decoder per organ, which only the sites that annotate it train."""

from __future__ import annotations

from typing import ClassVar

from panorgan.methods.base import Method, MethodConfig, ServerRule, SiteRule
from panorgan.methods.registry import register
from panorgan.networks.settings import OrganParts


class MultiDecoderConfig(MethodConfig):
    """No numbers of its own."""


@register("multidecoder", config=MultiDecoderConfig)
class MultiDecoder(Method):
    """Shared encoder, a whole decoder per organ."""

    paper: ClassVar[str] = "after Med3D, arXiv:1904.00625"
    organs: ClassVar[OrganParts] = "decoders"

    class Site(SiteRule):
        """Inherited: local steps on the partial loss; its network has decoders for its own organs only."""

    class Server(ServerRule):
        """Inherited: a decoder's weights are averaged over the sites that send them, its owners."""
