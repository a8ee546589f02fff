"""Pure functions on tensors."""

from panorgan.losses.distillation import distil_unlabelled, soft_bce, unlabelled
from panorgan.losses.expected import expected_cross_entropy
from panorgan.losses.partial import partial_dice_ce

__all__ = ["distil_unlabelled", "expected_cross_entropy", "partial_dice_ce", "soft_bce", "unlabelled"]
