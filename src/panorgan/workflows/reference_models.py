"""The models that a run's layers are compared with: those of other runs, and of its own sites before averaging."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from panorgan.errors import ConfigError, RunError
from panorgan.evaluation.forgetting import GLOBAL_MODEL
from panorgan.evaluation.similarity import layers_of
from panorgan.federation.local_models import load_weights, read_local_models
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.workflows.model_bundle import Model, load_model
from panorgan.workflows.run import Run


@dataclass(frozen=True)
class ReferenceModel:
    """A model to compare with, loaded on use."""

    name: str
    kind: Literal["run", "local"]
    network: Callable[[], SegmentationNetwork]


def other_runs(model: Model, against: Sequence[Path], device: torch.device) -> list[ReferenceModel]:
    """The models to compare with; incompatible ones are refused before anything is computed."""
    found: list[ReferenceModel] = []
    runs: set[str] = set()
    for folder in against:
        other = load_model(folder, torch.device("cpu"))
        _check_comparable(model, other, folder)
        if other.card["run"] in runs:
            raise ConfigError(
                "The same run is named twice.", code="run-named-twice", where=f"--against {folder}", fix="Name it once."
            )
        runs.add(other.card["run"])
        name = f"{other.card['method']['name']} ({other.card['name']})"
        if name in {known.name for known in found}:
            name = f"{other.card['method']['name']} ({other.card['run']})"
        # Loaded again on use: the device holds one other model at a time.
        found.append(ReferenceModel(name, "run", partial(_network_of, folder, device)))
    return found


def _check_comparable(model: Model, other: Model, folder: Path) -> None:
    """Both models must expect the same patches, and have some layers in common."""
    if other.plan != model.plan:
        raise RunError(
            "The two models expect differently prepared scans.",
            code="other-plan",
            where=str(folder),
            why="voxel size or intensities of their plans differ",
            fix="Compare runs of the same experiment, or give both the same 'plan'.",
        )
    own, others = (UNetSettings(**m.card["network"]).level_strides for m in (model, other))
    if own != others:
        raise RunError(
            "The two networks cannot be compared layer by layer.",
            code="other-levels",
            where=str(folder),
            why=f"the levels of one have strides {_in_words(own)}, those of the other {_in_words(others)}",
            fix="Compare runs with the same number of levels, 'dimensions' and 'strides' under 'network'.",
        )
    here, there = list(layers_of(model.network)), list(layers_of(other.network))
    if not set(here) & set(there):
        raise RunError(
            "The two networks have no layer in common.",
            code="no-common-layer",
            where=str(folder),
            why=f"layers are called {', '.join(here[:2])}… here and {', '.join(there[:2])}… there",
            fix="Compare runs whose methods share parts of the network; a 'solo' run with other 'solo' runs.",
        )


def _network_of(folder: Path, device: torch.device) -> SegmentationNetwork:
    return load_model(folder, device).network


def _in_words(strides: Sequence[Sequence[int]]) -> str:
    return " ".join("×".join(map(str, level)) for level in strides)


def local_models(run: Run, model: Model) -> list[ReferenceModel]:
    """Every site's model of one round before averaging, where the run kept them."""

    def with_weights(path: Path) -> SegmentationNetwork:
        network = copy.deepcopy(model.network)
        network.load_state_dict(load_weights(path))
        return network

    sites = {name: path for name, path in read_local_models(run.local_models_folder).items() if name != GLOBAL_MODEL}
    return [ReferenceModel(site, "local", partial(with_weights, path)) for site, path in sites.items()]
