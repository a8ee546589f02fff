"""The delivered model: `model.safetensors` and `model.json`, a card that says all that prediction needs to know."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

import panorgan
from panorgan.anatomy import Vocabulary
from panorgan.cases.preprocess import Plan
from panorgan.checksums import read_json, refuse_damage, sealed_json, sealed_tensors
from panorgan.errors import RunError
from panorgan.evaluation.inference import InferenceSettings, knows
from panorgan.federation.files import write_atomically
from panorgan.methods.base import Method
from panorgan.methods.exchange import Federation, SiteFacts
from panorgan.methods.registry import find_method
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.runs.model_checks import FORMAT, check_format, check_weights


@dataclass(frozen=True)
class DeliveredModel:
    """A network ready to predict, with the plan that its scans must follow."""

    network: SegmentationNetwork
    plan: Plan
    inference: InferenceSettings
    postprocess: str
    card: dict[str, Any]
    taught: frozenset[str] | None = None
    """Structures that the model was taught; None means all that its channels can show."""

    def can_show(self, structure: str) -> bool:
        """Whether the model can be asked for a structure: it was taught it, or all of its parts."""
        if not knows(self.network.vocabulary, structure):
            return False
        members = self.network.vocabulary.members(structure)
        return self.taught is None or structure in self.taught or self.taught.issuperset(members)

    def own_models(self) -> dict[str, DeliveredModel]:
        """Models of single sites inside this one, by site, where its method keeps them apart."""
        networks = _method(self.card).own_models(self.network)
        taught = {site: frozenset(self.card["sites"][site]["annotated"]) for site in networks}
        return {site: replace(self, network=network, taught=taught[site]) for site, network in networks.items()}


def save_model(folder: Path, weights: dict[str, torch.Tensor], card: dict[str, Any]) -> None:
    """Write the model folder as a whole or not at all."""
    scratch = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    content = save({key: value.contiguous() for key, value in sorted(weights.items())}, {"format": "pt"})
    write_atomically(scratch / "model.safetensors", sealed_tensors([content]), durable=True)
    whole = {"format": FORMAT, "panorgan": panorgan.__version__, **card}
    write_atomically(scratch / "model.json", sealed_json(whole, indent=1), durable=True)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(scratch, folder)


def load_model(folder: Path, device: torch.device) -> DeliveredModel:
    """Read a model folder (or the run folder around it)."""
    if (folder / "model" / "model.json").is_file():
        folder = folder / "model"
    path = folder / "model.json"
    if not path.is_file():
        raise RunError(
            "There is no model here.",
            where=str(folder),
            why="model.json is missing",
            fix="Point to a finished run, or to its 'model' folder.",
        )
    try:
        card: dict[str, Any] = read_json(path.read_bytes())
        check_format(card, folder)
        facts = {name: SiteFacts.from_json(name, content) for name, content in card["sites"].items()}
        federation = Federation(Vocabulary(card["organs"]), facts)
        network = _method(card).build_network(UNetSettings(**card["network"]), federation)
        content = (folder / "model.safetensors").read_bytes()
        refuse_damage(content)
        weights = load(content)
        check_weights(weights, folder)
        network.load_state_dict(weights)
        plan, inference = Plan(**card["plan"]), InferenceSettings(**card["inference"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError, SafetensorError) as error:
        raise RunError(
            "The model cannot be loaded.",
            where=str(folder),
            why=f"{type(error).__name__}: {error}",
            fix="Its files are damaged or from another panorgan version. Copy the folder again.",
        ) from error
    return DeliveredModel(network.to(device).eval(), plan, inference, card.get("postprocess", "none"), card)


def _method(card: dict[str, Any]) -> Method:
    method = find_method(card["method"]["name"])
    return method(method.Config(**{k: v for k, v in card["method"].items() if k != "name"}))
