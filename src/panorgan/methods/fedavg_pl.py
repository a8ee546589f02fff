"""FedAvg* — FedAvg on pseudo labels: UFPS without its modules, and the first of its starred baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from panorgan.methods.pseudo_labels import PseudoLabelConfig, PseudoLabelMethod, PseudoLabelServer, PseudoLabelSite
from panorgan.methods.registry import register


@register("fedavg_pl", config=PseudoLabelConfig)
class FedAvgPL(PseudoLabelMethod):
    """Weighted average after local training on all organs, labelled by the annotation or by the others' teachers."""

    paper: ClassVar[str] = "FedAvg* in Jiang et al., UFPS"
    equations: ClassVar[Mapping[str, str]] = {"eq. 4": "`Site.prepare`: `losses.unified_label.merge`"}

    class Site(PseudoLabelSite):
        """Inherited: Dice + BCE on the unified label."""

    class Server(PseudoLabelServer):
        """Inherited: the exchange of teachers, then FedAvg's mean."""
