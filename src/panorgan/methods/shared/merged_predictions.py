"""Merges the predictions of several models for one image; each model is trusted on the organs of its own site.

Softmax channels: a model's logit minus its own background logit is the log odds of an organ against background.
Stacked with a background of 0, background wins exactly where every model predicts background, and among organs the
most confident model wins. An organ that several models know gets the mean of their scores. A model trained only on a
union is used for the union's parts if no model was trained on the parts themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from panorgan.anatomy import Vocabulary
from panorgan.data.labels import Activation

_NEVER = -1e4

Trusted = Mapping[str, Collection[str]]
"""Organ → the models that are trusted on it."""


def trusted_models(
    vocabulary: Vocabulary, able: Mapping[str, Collection[str]], taught: Mapping[str, Collection[str]] | None = None
) -> Trusted:
    """By organ the models to trust: `able` are each model's organs, `taught` the structures that its site annotates."""
    able_on = {organ: {name for name in able if organ in able[name]} for organ in vocabulary}
    sure = {o: {n for n in names if taught is None or o in taught[n]} for o, names in able_on.items()}
    return {organ: sure[organ] or able_on[organ] for organ in vocabulary}


def merge_predictions(
    predictions: Iterable[tuple[str, torch.Tensor, Vocabulary]], trusted: Trusted, activation: Activation
) -> torch.Tensor:
    """Names, logits [B, channels, *S] and the organs that they show → logits [B, channels of all organs, *S]."""
    scores: dict[str, list[torch.Tensor]] = {organ: [] for organ in trusted}
    for name, logits, vocabulary in predictions:
        if activation == "softmax":
            logits = logits[:, 1:] - logits[:, :1]
        for index, organ in enumerate(vocabulary):
            if name in trusted[organ]:
                scores[organ].append(logits[:, index])
    # An organ that no model knows yet (its site joins later) is predicted nowhere.
    nowhere = torch.full_like(logits[:, 0], _NEVER)
    merged = [torch.stack(known).mean(0) if known else nowhere for known in scores.values()]
    if activation == "softmax":
        merged.insert(0, torch.zeros_like(merged[0]))
    return torch.stack(merged, dim=1)
