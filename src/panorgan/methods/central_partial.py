"""Central, partially labelled — all cases in one place, each with its own site's labels, and the partial loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from panorgan.methods.base import Method, MethodConfig, ServerRule, SiteRule
from panorgan.methods.registry import register


class CentralPartialConfig(MethodConfig):
    """No numbers of its own."""


@register("central_partial", config=CentralPartialConfig)
class CentralPartial(Method):
    """Pooled cases, partial labels, unknown organs left out of the loss."""

    paper: ClassVar[str] = (
        "Kim et al., Federated learning with knowledge distillation for multi-organ segmentation with partially "
        "labeled datasets (its comparison 'Multihead - centralized setting', here with `network.organs: heads`)"
    )
    equations: ClassVar[Mapping[str, str]] = {"eq. 3": "`Site.loss`: cross-entropy + Dice on what is annotated"}
    pooled: ClassVar[bool] = True

    class Site(SiteRule):
        """Inherited: the partial loss knows, case by case, what is annotated."""

    class Server(ServerRule):
        """Inherited: the mean over one participant."""
