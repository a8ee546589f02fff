"""What a delivered model must be before it may predict: of a format that we read, with weights that are numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from panorgan.errors import RunError
from panorgan.federation.checks import is_finite

FORMAT = 1


def check_format(card: Mapping[str, Any], folder: Path) -> None:
    """Refuse a model of another format: what its settings mean may have changed."""
    found = card.get("format")
    if found == FORMAT and not isinstance(found, bool):
        return
    raise RunError(
        f"The model has format {found!r:.20}; this panorgan reads format {FORMAT}.",
        where=str(folder),
        why=f"it was made with panorgan {card.get('panorgan', 'of unknown version')!s:.40}",
        fix="Use that version to predict, or have the model delivered again.",
    )


def check_weights(weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Refuse NaN and infinity: they would paint labels at random, or none at all."""
    bad = sorted(key for key, tensor in weights.items() if not is_finite(tensor))
    if bad:
        raise RunError(
            "The model holds weights that are not finite numbers.",
            where=str(folder),
            why=f"NaN or infinity in {', '.join(bad[:3])}" + (f" and {len(bad) - 3} more" if len(bad) > 3 else ""),
            fix="Its file is damaged, or training diverged. Copy the folder again, or deliver another round.",
        )
