"""The delivered model: `model.safetensors` and `model.json`, a card with everything that prediction needs."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save

import panorgan
from panorgan.agreement import Agreement
from panorgan.anatomy import Vocabulary, declare_finished
from panorgan.checksums import read_json, refuse_damage, sealed_json, sealed_tensors
from panorgan.data.channels import read_channels
from panorgan.data.labels import CONVENTIONS
from panorgan.data.volume import Volume, read_scan, scan_from_array, scan_from_channels, source_files
from panorgan.data_doctor.files import Problem
from panorgan.errors import AnatomyError, ConfigError, DataError, PanorganError, RunError, did_you_mean
from panorgan.evaluation.inference import InferenceSettings, clean_labels, knows, only_organs, predict_volume
from panorgan.evaluation.organ_statistics import organ_statistics
from panorgan.evaluation.postprocess import compares_organs
from panorgan.federation.checks import is_finite
from panorgan.federation.coordinator import Coordinator
from panorgan.federation.files import write_atomically
from panorgan.federation.start_settings import CARD, WEIGHTS, model_folder
from panorgan.methods.base import Method
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.preparation.plan import Plan
from panorgan.preparation.sampling import sliced_axis
from panorgan.workflows.channel_files import (
    FilePath,
    channels_by_name,
    is_paths,
    one_file,
    refuse_other_channels,
)
from panorgan.workflows.device import choose_device
from panorgan.workflows.input_doubts import doubts_about, nothing_found
from panorgan.workflows.model_card import CARD as CARD_IN_WORDS
from panorgan.workflows.model_card import INPUT_CHANNELS, model_card
from panorgan.workflows.prediction import Prediction
from panorgan.workflows.run import Run

FORMAT = 1
OWN_ORGANS = "own_organs"
"""What a card calls the organs that the catalogue does not know; left out where there are none."""


@dataclass(frozen=True)
class Model:
    """A network ready to predict, with the plan that its scans must follow.

    `load_model` reads one. `taught` are the structures that the model was trained on; None means all that its channels
    can show. `weights` is the SHA-256 of the file of weights.
    """

    network: SegmentationNetwork
    plan: Plan
    inference: InferenceSettings
    postprocess: str
    card: dict[str, Any]
    taught: frozenset[str] | None = None
    weights: str = ""

    @property
    def vocabulary(self) -> Vocabulary:
        """The organs that it segments."""
        return self.network.vocabulary

    @property
    def channels(self) -> tuple[str, ...]:
        """The channels that a scan must have, in this order; empty where the experiment did not name them."""
        return tuple(self.card.get(INPUT_CHANNELS, ()))

    @property
    def input_channels(self) -> int:
        """How many channels the network reads."""
        return max(1, len(self.channels))

    def predict(
        self,
        scan: FilePath | Sequence[FilePath] | Mapping[str, FilePath] | NDArray[Any],
        affine: NDArray[Any] | None = None,
        slices: Sequence[Path] = (),
        organs: Sequence[str] | None = None,
    ) -> Prediction:
        """Segment one scan.

        Parameters
        ----------
        scan : a NIfTI, MetaImage or NRRD file, a folder with one DICOM series, or the voxels themselves: [X, Y, Z] in
            Hounsfield units for CT. For a model of several `channels`: a file for each, by name or in their order; one
            4-D file; or an array [C, X, Y, Z].
        affine : [4, 4] from voxel indices to RAS millimetres (as nibabel has it); with an array only.
        slices : the files of the series, where a DICOM folder holds more than one.
        organs : segment only these, such as ["liver", "kidney"]; the integers stay the same. All if left out.

        Returns
        -------
        Prediction : the label map [X, Y, Z] on the scan's own grid.
        """
        is_file = is_paths(scan)
        if is_file != (affine is None):
            raise DataError(
                "A file has its own affine." if is_file else "An array alone has no voxel size.",
                code="affine-not-needed" if is_file else "affine-missing",
                fix="Leave the affine out: predict(path)."
                if is_file
                else "Pass its affine too: predict(array, affine).",
            )
        if isinstance(scan, str | os.PathLike):
            path = Path(scan)
            if len(self.channels) > 1:
                return self.segment(read_channels(one_file(path, self.channels)), path.name, organs=organs)
            source = slices or source_files(path)
            return self.segment(read_scan(path, source), path.name, source=source, organs=organs)
        if is_paths(scan):
            channels = channels_by_name(scan, self.channels)
            return self.segment(read_channels(channels), channels[0].path.name, organs=organs)
        voxels = np.asarray(scan)
        read = scan_from_channels if len(self.channels) > 1 and voxels.ndim == 4 else scan_from_array
        return self.segment(read(voxels, np.asarray(affine)), "array", organs=organs)

    def doubts(self, volume: Volume, modality: str = "") -> tuple[Problem, ...]:
        """Doubts about segmenting a scan with this model; `modality` is that of its DICOM header."""
        refuse_other_channels(volume, self.channels)
        return doubts_about(volume, self.plan, sliced_axis(self.inference.patch_size), modality, self.channels)

    def segment(
        self,
        volume: Volume,
        name: str,
        doubts: Sequence[Problem] | None = None,
        source: Sequence[Path] = (),
        organs: Sequence[str] | None = None,
    ) -> Prediction:
        """Segment a scan that is in memory.

        `doubts` are those already known, `name` tells which scan it is, `source` are the files of its DICOM series.
        """
        wanted = None if organs is None else self.organs_for(organs)
        found = self.doubts(volume) if doubts is None else doubts
        labels = self.label_map(volume, wanted)
        about = {"scan": name, "model": self.card["name"], "run": self.card["run"]}
        if self.weights:
            about["weights"] = self.weights
        if not labels.any():
            found = (*found, nothing_found())
        measured = organ_statistics(labels, volume.voxels, volume.affine, self.vocabulary, wanted)
        return Prediction(labels, volume.affine, self.vocabulary, about, tuple(found), tuple(source), measured)

    def organs_for(self, structures: Sequence[str]) -> tuple[str, ...]:
        """The organs that make up some structures, with what lies inside them, in the order of the vocabulary."""
        members: set[str] = set()
        for structure in structures:
            if not knows(self.vocabulary, structure):
                raise AnatomyError(
                    f"The model does not segment {structure!r:.80}.",
                    code="organ-not-in-model",
                    fix=did_you_mean(structure, self.vocabulary) or f"It segments: {', '.join(self.vocabulary)}.",
                )
            members.update(self.vocabulary.members(structure))
        return tuple(organ for organ in self.vocabulary if organ in members)

    def label_map(self, volume: Volume, organs: Sequence[str] | None = None) -> NDArray[np.uint8]:
        """Label map [X, Y, Z] on the scan's own grid, post-processed as the model specifies; of all organs or some.

        Where post-processing compares organs with each other, a model always computes all of them.
        """
        refuse_other_channels(volume, self.channels)
        all_needed = compares_organs(self.postprocess, self.vocabulary.organs)
        labels = predict_volume(self.network, volume, self.plan, self.inference, None if all_needed else organs)
        labels = clean_labels(labels, self.vocabulary, self.postprocess)
        return labels if organs is None else only_organs(labels, organs, self.vocabulary)

    def can_show(self, structure: str) -> bool:
        """Whether the model can segment a structure: it was trained on it, or on all of its parts."""
        if not knows(self.vocabulary, structure):
            return False
        members = self.vocabulary.members(structure)
        return self.taught is None or structure in self.taught or self.taught.issuperset(members)

    def own_models(self) -> dict[str, Model]:
        """Models of single sites inside this one, by site, where its method keeps them separate."""
        networks = _method(self.card).own_models(self.network)
        taught = {site: frozenset(self.card["sites"][site]["annotated"]) for site in networks}
        return {site: replace(self, network=network, taught=taught[site]) for site, network in networks.items()}


# -- reading -----------------------------------------------------------------------------------------------------------


def load_model(folder: str | os.PathLike[str] | Run, device: str | torch.device = "auto") -> Model:
    """Read a delivered model.

    Parameters
    ----------
    folder : a run, its folder, or the `model` folder inside.
    device : auto (CUDA where available), cpu or cuda.
    """
    if isinstance(device, str):
        device = choose_device(device, "device")
    folder = model_folder(folder.path if isinstance(folder, Run) else Path(folder))
    try:
        card: dict[str, Any] = read_json((folder / CARD).read_bytes())
        _check_format(card, folder)
        declare_finished(card.get(OWN_ORGANS))
        facts = {name: SiteInfo.from_json(name, content) for name, content in card["sites"].items()}
        federation = Federation(Vocabulary(card["organs"]), facts)
        network = _method(card).build_network(UNetSettings(**card["network"]), federation)
        content = (folder / WEIGHTS).read_bytes()
        refuse_damage(content)
        tensors = load(content)
        _check_weights(tensors, folder)
        network.load_state_dict(tensors)
        plan, inference = Plan(**card["plan"]), InferenceSettings(**card["inference"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError, SafetensorError) as error:
        raise RunError(
            "The model cannot be loaded.",
            code="model-unreadable",
            where=str(folder),
            why=f"{type(error).__name__}: {error}",
            fix="Its files are damaged or from another panorgan version. Copy the folder again.",
        ) from error
    weights = hashlib.sha256(content).hexdigest()
    return Model(network.to(device).eval(), plan, inference, card.get("postprocess", "none"), card, weights=weights)


def channels_of_model(folder: Path) -> tuple[str, ...]:
    """The channels that a delivered model takes; empty if it names none, or is invalid (`load_model` reports that)."""
    try:
        return tuple(read_json((model_folder(folder) / CARD).read_bytes()).get(INPUT_CHANNELS, ()))
    except (PanorganError, OSError, ValueError, TypeError, AttributeError):
        return ()


def _check_format(card: Mapping[str, Any], folder: Path) -> None:
    """Refuse a model of another format: the meaning of its settings may have changed."""
    found = card.get("format")
    if found == FORMAT and not isinstance(found, bool):
        return
    raise RunError(
        f"The model has format {found!r:.20}; this panorgan reads format {FORMAT}.",
        code="model-format",
        where=str(folder),
        why=f"it was made with panorgan {card.get('panorgan', 'of unknown version')!s:.40}",
        fix="Use that version to predict, or have the model delivered again.",
    )


def _check_weights(weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Refuse NaN and infinity: labels would be random, or missing."""
    bad = sorted(key for key, tensor in weights.items() if not is_finite(tensor))
    if bad:
        raise RunError(
            "The model holds weights that are not finite numbers.",
            code="weights-not-finite",
            where=str(folder),
            why=f"NaN or infinity in {', '.join(bad[:3])}" + (f" and {len(bad) - 3} more" if len(bad) > 3 else ""),
            fix="Its file is damaged, or training diverged. Copy the folder again, or deliver another round.",
        )


def _method(card: Mapping[str, Any]) -> Method:
    try:
        method = find_method(card["method"]["name"])
    except PanorganError as error:
        raise ConfigError(
            f"The model's method {card['method']['name']!r} is not known here.",
            code="unknown-method",
            where=f"{CARD}: method.name",
            why="it was registered by a script, or by a package that is not installed",
            fix="Load the model in that script, or install the method as a package (docs/add-a-method.md).",
        ) from error
    return method(method.Config(**{k: v for k, v in card["method"].items() if k != "name"}))


# -- writing -----------------------------------------------------------------------------------------------------------


def deliver(run: Run, experiment: Agreement, plan: Plan, coordinator: Coordinator) -> dict[str, Any]:
    """Write a run's model folder: the chosen round's weights and a card, which is returned.

    Removes what only further rounds would need: answers, and teachers (of N sites, N at each of them).
    """
    chosen, weights = coordinator.delivered_weights()
    best = coordinator.state.best
    method = experiment.build_method()
    network = method.build_network(experiment.network, coordinator.federation)
    card: dict[str, Any] = {
        "name": experiment.name,
        "organs": list(experiment.vocabulary),
        "channels": list(network.channels),
        "convention": CONVENTIONS[network.activation],
        "method": experiment.method,
        "network": experiment.network.as_json(),
        "plan": plan.as_json(),
        "inference": {
            "patch_size": list(experiment.training.sampling.patch_size),
            "overlap": experiment.training.overlap,
        },
        "postprocess": experiment.postprocess,
        "sites": {name: facts.as_json() for name, facts in coordinator.federation.sites.items()},
        "round": chosen,
        "validation_dice": best["dice"] if best and int(best["round"]) == chosen else None,
        "parameters": sum(p.numel() for p in network.parameters()),
        "run": coordinator.setup.run,
        **later_entries(experiment),
    }
    save_model(run.model_folder, weights, card)
    for spent in (run.path / "spool", coordinator.tensor_store.folder, *run.path.glob("sites/*/vault")):
        shutil.rmtree(spent, ignore_errors=True)
    return card


def later_entries(experiment: Agreement) -> dict[str, Any]:
    """The entries of a card that most experiments do not have: own organs, and the channels of a scan."""
    entries = {
        OWN_ORGANS: {name: own.as_json() for name, own in experiment.organs.items()},
        INPUT_CHANNELS: list(experiment.channels),
    }
    return {name: content for name, content in entries.items() if content}


def save_model(folder: Path, weights: dict[str, torch.Tensor], card: dict[str, Any]) -> None:
    """Write the model folder as a whole or not at all."""
    scratch = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    content = save({key: value.contiguous() for key, value in sorted(weights.items())}, {"format": "pt"})
    write_atomically(scratch / "model.safetensors", sealed_tensors([content]), durable=True)
    whole = {"format": FORMAT, "panorgan": panorgan.__version__, **card}
    write_atomically(scratch / "model.json", sealed_json(whole, indent=1), durable=True)
    write_atomically(scratch / CARD_IN_WORDS, model_card(whole))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(scratch, folder)
