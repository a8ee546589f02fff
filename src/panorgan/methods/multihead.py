"""Multi-head FedAvg — one U-Net for all, a small head per organ, which only the sites that annotate it train.

The baseline of FLKD. There all heads are averaged over all sites, also over those that never touch them; to have it
so: `organ_parts: everyone` and `weighting: uniform`.
"""

from __future__ import annotations

from typing import ClassVar

from panorgan.methods.base import Method, MethodConfig, ServerRule, SiteRule
from panorgan.methods.registry import register
from panorgan.networks.settings import OrganParts


class MultiheadConfig(MethodConfig):
    """No numbers of its own."""


@register("multihead", config=MultiheadConfig)
class Multihead(Method):
    """Shared encoder and decoder, a head of 162 parameters per organ."""

    paper: ClassVar[str] = "the baseline of FLKD (see there), section 3.5"
    organs: ClassVar[OrganParts] = "heads"

    class Site(SiteRule):
        """Inherited: local steps on the partial loss; its network has heads for its own organs only."""

    class Server(ServerRule):
        """Inherited: a head's weights are averaged over the sites that send them, its owners."""
