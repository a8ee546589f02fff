"""UFPS's sites without a federation: a network with fixed outputs, a round that begins, a batch to be checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.shared.readiness import READY
from panorgan.methods.ufps import UFPS, UFPSConfig
from panorgan.methods.ufps.sparse_masks import GLOBAL
from panorgan.networks import SegmentationNetwork
from panorgan.preparation.batch import Batch
from panorgan.preparation.store import StoredCase

OFF = {
    "weight_schedule": "none",
    "reverse_ce": False,
    "main_teacher": False,
    "uncertainty_aware": "none",
    "sharpness": "none",
}
ORGANS = ("liver", "spleen")
FACTS = {"a": SiteInfo("a", 1, {"liver": 1}), "b": SiteInfo("b", 3, {"spleen": 3})}
FEDERATION = Federation(Vocabulary(ORGANS), FACTS)


class FixedNetwork(SegmentationNetwork):
    """Logits [B, 3, 2, 2], whatever the image."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(Vocabulary(ORGANS), "softmax")
        self.logits = nn.Parameter(logits.clone())

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.logits


def site_of(
    model: nn.Module, kind: type[UFPS.Site] = UFPS.Site, cases: Sequence[str] = ("x", "y"), **config: object
) -> UFPS.Site:
    stored = [StoredCase(case, case, "a", ("liver",), Path("nowhere")) for case in cases]
    tools = SiteTools(model, torch.optim.SGD(model.parameters(), 0.1), cases=stored)
    return kind(UFPSConfig(**config), FACTS["a"], FEDERATION, tools)


def enter(
    site: UFPS.Site,
    round_: int,
    rounds: int,
    global_bits: torch.Tensor | None = None,
    ready: Sequence[str] = ORGANS,
) -> None:
    """Begin a training round with the weights that the model has, which may teach some organs."""
    tensors = {key: value.clone() for key, value in site.model.state_dict().items()}
    site.round_info = RoundInfo("train", round_, rounds)
    numbers = {f"{READY}{organ}": 1.0 for organ in ready}
    site.received = Payload(tensors if global_bits is None else {**tensors, GLOBAL: global_bits}, numbers)
    site.before_round()


def make_batch(sure: Sequence[float] = (0.9, 0.6)) -> Batch:
    """Two samples of four voxels: one liver by ground truth, one spleen by a teacher (so sure), two of nothing."""
    masks = torch.tensor([[[[True, False], [False, False]]]] * 2)
    soft_targets = torch.tensor([[[[0.0, p], [0.0, 0.0]]] for p in sure])
    return Batch(
        torch.full((2, 1, 2, 2), 0.5),
        masks,
        torch.ones(2, 1, dtype=torch.bool),
        ("liver",),
        ("x", "y"),
        soft_targets,
        ("spleen",),
        torch.ones(2, 1, dtype=torch.bool),
    )
