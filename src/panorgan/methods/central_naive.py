"""Central, naive — all cases in one place, and whatever a case does not label is taught as background.

What happens when partially labelled sets are simply thrown together: the same liver is "liver" in one case and
"background" in the next.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from panorgan.cases.sampling import Batch
from panorgan.methods.base import Method, MethodConfig, ServerRule, SiteRule
from panorgan.methods.registry import register


class CentralNaiveConfig(MethodConfig):
    """No numbers of its own."""


@register("central_naive", config=CentralNaiveConfig)
class CentralNaive(Method):
    """Pooled cases, unlabelled organs treated as background."""

    paper: ClassVar[str] = (
        "Kanhere et al., Privacy-Preserving Collaboration for Multi-Organ Segmentation via Federated Learning from "
        "Sites with Partial Labels (its comparison 'Central Aggregation', section 3.5.2)"
    )
    pooled: ClassVar[bool] = True

    class Site(SiteRule):
        """Sees every unknown organ as absent."""

        def loss(self, batch: Batch) -> torch.Tensor:
            """The ordinary loss on labels that deny what they do not know."""
            return super().loss(batch.assuming_unknown_is_absent())

    class Server(ServerRule):
        """Inherited: the mean over one participant."""
