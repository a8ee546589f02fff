"""Every site's model of one round on disk, before averaging, and the averaged one next to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from panorgan.checksums import DamagedError, is_damaged, sealed_tensors
from panorgan.errors import RunError
from panorgan.evaluation.forgetting import GLOBAL_MODEL
from panorgan.federation.files import write_atomically
from panorgan.methods.base import ServerRule
from panorgan.methods.protocol import Stage, Updates


def round_to_keep(stages: Sequence[Stage], share: float) -> int:
    """The round, counted over the whole run, that ends a share of the training rounds."""
    training = next((place for place, stage in enumerate(stages) if stage.name == "train"), len(stages) - 1)
    before = sum(stage.rounds for stage in stages[:training])
    return before + max(1, round(share * stages[training].rounds))


def write_local_models(folder: Path, rule: ServerRule, updates: Updates) -> None:
    """One file per site that answered: the model it would deliver alone. Call before the updates are averaged.

    That is the weights it sent, and for all others (such as other sites' heads) those it started the round from.
    """
    delivered = rule.delivered()
    before = {key: rule.weights.get(key, value) for key, value in delivered.items()}
    for site in updates.sites:
        sent = {key: updates.tensor(site, key) for key in updates.keys(site) if key in before}
        _write(folder / f"{site}.safetensors", {**before, **sent})
    for path in folder.glob("*.safetensors"):
        if path.stem not in updates.sites:  # the round is repeated, and this site did not answer this time
            path.unlink()


def write_global_model(folder: Path, rule: ServerRule) -> None:
    """The federation's model after averaging that round."""
    _write(folder / f"{GLOBAL_MODEL}.safetensors", rule.delivered())


def read_local_models(folder: Path) -> dict[str, Path]:
    """Files by model: the sites sorted by name, the global model last."""
    found = {path.stem: path for path in sorted(folder.glob("*.safetensors"))}
    return {name: found[name] for name in sorted(found, key=lambda name: (name == GLOBAL_MODEL, name))}


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights of one file."""
    try:
        if is_damaged(path):
            raise DamagedError
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(
            "The model of a single site cannot be read.",
            code="local-model-unreadable",
            where=str(path),
            why=str(error),
            fix="Restore the file from a backup, or remove its folder: it is used for analyses only.",
        ) from error


def _write(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    # Durable like the checkpoint that follows: a finished round has its local models.
    content = {key: value.detach().cpu().contiguous() for key, value in sorted(weights.items())}
    write_atomically(path, sealed_tensors([save(content, {"format": "pt"})]), durable=True)
