"""The global model as the main teacher (UFPS's GMT, eq. 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Disagreement = Literal["left_out", "background"]
"""Where eq. 5 intersects labels that differ. *left_out*: it has no class, as in the equation. *background*: that."""


@dataclass(frozen=True)
class MainTeacher:
    """The global model as the main teacher of eq. 5.

    Parameters
    ----------
    scores : [B, C + 1, *S], its logits or probabilities.
    share : v.
    known : the organs it is asked about; all others are left to the teachers. None: all.
    """

    scores: torch.Tensor
    share: float = 0.8
    known: tuple[str, ...] | None = None
    disagreement: Disagreement = "left_out"

    def knows(self, organ: str) -> bool:
        """Whether it is asked about an organ."""
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
    the main teacher. Otherwise from both: the label is 0 where they disagree, and where that is is returned as well,
    [B, *S] bool. A patch in which the main teacher sees no organ is of that kind (0 < v · 0 is false).

    `counted` [B, *S] bool: the voxels that volumes are measured on; ground truth is no opinion. `left_alone`, the same:
    where teachers name an organ that the main teacher does not know. Their word holds there, and counts in no volume.
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
