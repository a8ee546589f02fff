"""The global model as the main teacher (UFPS's GMT, eq. 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Disagreement = Literal["left_out", "background"]
"""Label of voxels where eq. 5 intersects different labels. *left_out*: no class, as in the equation. *background*."""


@dataclass(frozen=True)
class MainTeacher:
    """The global model as the main teacher of eq. 5.

    Parameters
    ----------
    scores : [B, C + 1, *S], its logits or probabilities.
    share : v.
    known : the organs that it is used for; the teachers decide on all others. None: all.
    """

    scores: torch.Tensor
    share: float = 0.8
    known: tuple[str, ...] | None = None
    disagreement: Disagreement = "left_out"

    def knows(self, organ: str) -> bool:
        """Whether the main teacher is used for an organ."""
        return self.known is None or organ in self.known


def global_main_teacher(
    teachers: torch.Tensor,
    main: torch.Tensor,
    share: float = 0.8,
    counted: torch.Tensor | None = None,
    left_alone: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eq. 5, for labels [B, *S] of the teachers and of the main teacher (0 is background).

    A patch in which both name the same organ in less than `share` of the main teacher's foreground takes its label from
    the main teacher. Otherwise from both: the label is 0 where they disagree, and the mask of these voxels is returned
    as well, [B, *S] bool. A patch in which the main teacher sees no organ is of the second kind (0 < v · 0 is false).

    `counted` [B, *S] bool: the voxels that volumes are measured on, those without ground truth. `left_alone`, same
    shape: where teachers name an organ that the main teacher does not know. Their label holds, and counts in no volume.
    """
    agree = teachers == main
    foreground = main > 0 if counted is None else (main > 0) & counted
    if left_alone is not None:
        foreground = foreground & ~left_alone
    together = (foreground & agree).flatten(1).sum(1)
    alone = (together < share * foreground.flatten(1).sum(1)).view(-1, *(1,) * (main.ndim - 1))
    label, disagreed = torch.where(alone | agree, main, torch.zeros_like(main)), ~(alone | agree)
    if left_alone is None:
        return label, disagreed
    return torch.where(left_alone, teachers, label), disagreed & ~left_alone
