"""Central, fully labelled — all cases in one place with all labels: the upper bound, possible only on a benchmark."""

from __future__ import annotations

from typing import ClassVar, Literal

from panorgan.methods.base import Method, MethodConfig, ServerRule, SiteRule
from panorgan.methods.registry import register


class CentralFullConfig(MethodConfig):
    """No numbers of its own."""


@register("central_full", config=CentralFullConfig)
class CentralFull(Method):
    """Pooled cases, all labels, withheld ones included."""

    paper: ClassVar[str] = (
        "Jiang et al., UFPS: A unified framework for partially annotated federated segmentation in heterogeneous data "
        "distribution (its upper bound, 'Centralized')"
    )
    pooled: ClassVar[bool] = True
    labels: ClassVar[Literal["annotated", "withheld"]] = "withheld"

    class Site(SiteRule):
        """Inherited: with every organ annotated the partial loss is the ordinary one."""

    class Server(ServerRule):
        """Inherited: the mean over one participant."""
