"""Central, partially labelled — all cases in one place, each with its own site's labels, and the partial loss."""

from __future__ import annotations

from typing import ClassVar

from panorgan.methods.base import Method, MethodConfig, ServerRule, SiteRule
from panorgan.methods.registry import register


class CentralPartialConfig(MethodConfig):
    """No numbers of its own."""


@register("central_partial", config=CentralPartialConfig)
class CentralPartial(Method):
    """Pooled cases, partial labels, unknown organs left out of the loss."""

    pooled: ClassVar[bool] = True

    class Site(SiteRule):
        """Inherited: the partial loss knows, case by case, what is annotated."""

    class Server(ServerRule):
        """Inherited: the mean over one participant."""
