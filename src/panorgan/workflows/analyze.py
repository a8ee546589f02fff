"""Analyses of a finished run: sharpness of its minimum, the loss around it, similarity of its layers to other models.

The loss is the same for every method, so that runs are comparable: partial Dice + cross-entropy on annotated
structures, computed on fixed patches, which depend only on data, settings and seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch.backends import cudnn

import panorgan
from panorgan.anatomy import Vocabulary
from panorgan.config import Experiment, parse_experiment
from panorgan.data.labels import structures_of
from panorgan.errors import ConfigError, DataError, RunError
from panorgan.evaluation.curvature import (
    Loss,
    Trace,
    hessian_vector_product,
    loss_and_gradient,
    top_eigenvalues,
    trace_samples,
)
from panorgan.evaluation.landscape import filter_normalised_direction, loss_plane, plane_steps, weights_by_name
from panorgan.evaluation.similarity import cka_matrix, layer_features
from panorgan.federation.events import EventLog, Listener
from panorgan.losses import partial_dice_ce
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.networks import SegmentationNetwork
from panorgan.networks.second_derivatives import use_plain_norms
from panorgan.preparation.batch import Batch
from panorgan.preparation.sampling import PatchSampler
from panorgan.seeds import derive_seed
from panorgan.settings import Settings
from panorgan.workflows.analysis_files import ALL_SITES, Analysis, Landscape, PlaceCurvature, Similarity, write_analysis
from panorgan.workflows.device import choose_device, use_hardware
from panorgan.workflows.execute import check_data
from panorgan.workflows.model_bundle import Model, load_model
from panorgan.workflows.prepare import PreparedFederation, PreparedSite, prepare
from panorgan.workflows.reference_models import ReferenceModel, local_models, other_runs
from panorgan.workflows.run import Run


class AnalysisSettings(Settings):
    """What to analyse, and how precisely; 0 leaves a part out."""

    eigenvalues: int = Field(5, ge=0, description="largest eigenvalues of the Hessian; λ_max/λ_5 needs five")
    probes: int = Field(16, ge=0, description="random vectors for the Hessian's trace")
    grid: int = Field(15, ge=0, description="points along each side of the loss landscape, odd")
    radius: float = Field(1.0, gt=0, description="extent of the landscape, in lengths of the model's filters")
    batches: int = Field(4, ge=1, description="batches of patches per site")
    batch_size: int | None = Field(None, ge=1, description="patches per batch; the experiment's if left out")
    split: Literal["validation", "train"] = Field("validation", description="the cases that patches are cut from")
    places: int = Field(512, ge=2, description="places per patch at which layers are compared")
    seed: int = Field(0, description="for patches, directions and probes")


@dataclass(frozen=True)
class _Subject:
    """The model, its weights, and every site's loss and patches."""

    model: Model
    parameters: tuple[torch.Tensor, ...]
    losses: Mapping[str, Sequence[Loss]]
    images: Sequence[torch.Tensor]
    device: torch.device

    @property
    def size(self) -> int:
        """Number of weights."""
        return sum(parameter.numel() for parameter in self.parameters)


Progress = Callable[[str, int, int], None]


def analyze(
    folder: Path,
    settings: AnalysisSettings | None = None,
    against: Sequence[Path] = (),
    device: str = "auto",
    listeners: tuple[Listener, ...] = (),
    cache: Path | None = None,
) -> Analysis:
    """Analyse the delivered model of a finished run, and write the results into its folder.

    Layers are compared with the models of other runs (`against`), and with those of single sites where the run kept
    them (`local_models`).
    """
    settings, run = settings or AnalysisSettings(), Run(folder)
    manifest = run.manifest
    _check(run, settings)
    experiment = parse_experiment(manifest["experiment"], str(run.manifest_file))
    where = choose_device(device, "--device")
    use_hardware(experiment.hardware.model_copy(update={"device": where.type}))
    model = load_model(run.model_folder, where)
    use_plain_norms(model.network)
    others = other_runs(model, against, where)
    events = EventLog(None, listeners)

    def progress(what: str, done: int, total: int) -> None:
        events.transient("analyze", what=what, done=done, total=total)

    prepared = prepare(experiment, cache, progress)
    check_data(run, manifest, prepared)
    subject = _subject(model, experiment, prepared, settings, where)
    with _all_digits():
        analysis = Analysis(
            _about(subject, manifest, settings),
            _curvature(subject, settings, progress),
            _landscape(subject, settings, progress) if settings.grid else None,
            _similarity(subject, settings, [*others, *local_models(run, model)], progress),
        )
    write_analysis(run, analysis)
    return analysis


def _check(run: Run, settings: AnalysisSettings) -> None:
    if not run.complete:
        raise RunError(
            "This run is not finished.",
            code="run-not-finished",
            where=str(run.path),
            why="it has no metrics.csv, which is written last",
            fix="Finish it with 'panorgan train --resume', then analyse it.",
        )
    if settings.grid == 1:
        raise ConfigError(
            "A loss landscape of one point shows nothing.",
            code="grid-too-small",
            where="--grid",
            fix="Use 3 or more, or 0 to leave the landscape out.",
        )
    if settings.grid and settings.grid % 2 == 0:
        raise ConfigError(
            f"The grid of the loss landscape has an even number of points, {settings.grid}.",
            code="grid-even",
            where="--grid",
            why="the model itself should be its centre",
            fix=f"Use {settings.grid + 1}, or 0 to leave the landscape out.",
        )


def _subject(
    model: Model,
    experiment: Experiment,
    prepared: PreparedFederation,
    settings: AnalysisSettings,
    device: torch.device,
) -> _Subject:
    sites = {site.name: site for site in prepared.training}
    facts = {name: SiteInfo(name, len(site.train), dict.fromkeys(site.annotated, 1)) for name, site in sites.items()}
    federation = Federation(Vocabulary(experiment.vocabulary), facts)
    losses: dict[str, list[Loss]] = {}
    images = []
    for name, site in sites.items():
        batches = _patches(site, model, experiment, settings, device)
        organs = federation.organs_of(name)
        losses[name] = [partial(_loss, model.network, batch, organs) for batch in batches]
        images += [batch.image for batch in batches]
    return _Subject(model, tuple(model.network.parameters()), losses, images, device)


def _patches(
    site: PreparedSite,
    model: Model,
    experiment: Experiment,
    settings: AnalysisSettings,
    device: torch.device,
) -> list[Batch]:
    """A site's batches, the same in every analysis and for every method."""
    cases = site.validation if settings.split == "validation" else site.train
    if not cases:
        raise DataError(
            f"Site {site.name} has no {settings.split} cases.",
            code="split-empty",
            where=f"sites.{site.name}",
            fix="Analyse the training cases instead: --split train.",
        )
    changes = {"patch_size": model.inference.patch_size, "batch_size": settings.batch_size}
    given = {name: value for name, value in changes.items() if value is not None}
    sampling = experiment.training.sampling.model_copy(update=given)
    sampler = PatchSampler(cases, structures_of([case.structures for case in cases]), sampling)
    seed = derive_seed(settings.seed, "analyze", site.name)
    return [batch.to(device).unpack() for batch in sampler.batches(settings.batches, seed)]


def _loss(network: SegmentationNetwork, batch: Batch, organs: tuple[str, ...]) -> torch.Tensor:
    logits, vocabulary = network.channels_for(batch.image, organs)
    return partial_dice_ce(logits, batch, vocabulary, network.activation).mean()


@contextmanager
def _all_digits() -> Iterator[None]:
    """Compute in full float32: the ten bits of TF32 would hide small eigenvalues."""
    kept, cudnn.allow_tf32 = cudnn.allow_tf32, False
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            "The device does not have enough memory for this analysis.",
            code="out-of-memory",
            why=str(error).split(". ")[0],
            fix="Use smaller batches (--batch-size 1, more --batches), or the CPU (--device cpu).",
        ) from error
    finally:
        cudnn.allow_tf32 = kept


def _about(subject: _Subject, manifest: Mapping[str, Any], settings: AnalysisSettings) -> dict[str, Any]:
    return {
        "run": manifest["run"],
        "round": subject.model.card["round"],
        "parameters": subject.size,
        "patch_size": list(subject.model.inference.patch_size),
        "patches_per_site": sum(len(image) for image in subject.images) // len(subject.losses),
        "device": str(subject.device),
        "panorgan": panorgan.__version__,
        "torch": torch.__version__,
        "settings": settings.as_json(),
    }


# -- curvature ---------------------------------------------------------------------------------------------------


def _curvature(subject: _Subject, settings: AnalysisSettings, progress: Progress) -> tuple[PlaceCurvature, ...]:
    """Every site's Hessian, and that of the mean of their losses."""
    sites, size, device = subject.losses, subject.size, subject.device
    found = {site: loss_and_gradient(losses, subject.parameters) for site, losses in sites.items()}
    found[ALL_SITES] = (
        float(np.mean([loss for loss, _ in found.values()])),
        torch.stack([gradient for _, gradient in found.values()]).mean(0),
    )
    everything = [loss for losses in sites.values() for loss in losses]  # equally many batches at each site
    seed = derive_seed(settings.seed, "eigenvalues")
    eigenvalues: dict[str, tuple[float, ...]] = {}
    for done, (place, losses) in enumerate({**sites, ALL_SITES: everything}.items(), start=1):
        product = partial(hessian_vector_product, losses, subject.parameters)
        if settings.eigenvalues:
            eigenvalues[place] = top_eigenvalues(product, size, settings.eigenvalues, seed, device).values
            progress("eigenvalues of the Hessian", done, len(found))
    traces = _traces(subject, settings, progress)
    return tuple(
        PlaceCurvature(
            place,
            loss,
            gradient.norm().item(),
            eigenvalues.get(place, ()),
            traces[place].mean,
            traces[place].standard_error,
        )
        for place, (loss, gradient) in sorted(found.items(), key=lambda item: item[0] != ALL_SITES)
    )


def _traces(subject: _Subject, settings: AnalysisSettings, progress: Progress) -> dict[str, Trace]:
    """All sites use the same probes, so the mean of their samples is a sample of the mean."""
    if not settings.probes:
        return dict.fromkeys((*subject.losses, ALL_SITES), Trace(np.nan, np.nan))
    seed, total = derive_seed(settings.seed, "trace"), settings.probes * len(subject.losses)
    samples = {}
    for index, (site, losses) in enumerate(subject.losses.items()):
        before = index * settings.probes
        samples[site] = trace_samples(
            partial(hessian_vector_product, losses, subject.parameters),
            subject.size,
            settings.probes,
            seed,
            subject.device,
            lambda done, before=before: progress("trace of the Hessian", before + done, total),  # type: ignore[misc]
        )
    samples[ALL_SITES] = np.mean(list(samples.values()), axis=0)
    return {place: Trace.of(values) for place, values in samples.items()}


# -- landscape ---------------------------------------------------------------------------------------------------


def _landscape(subject: _Subject, settings: AnalysisSettings, progress: Progress) -> Landscape:
    """The same plane for every site."""
    weights = weights_by_name(subject.model.network)
    first, second = (
        filter_normalised_direction(weights, derive_seed(settings.seed, "direction", number)) for number in (1, 2)
    )
    steps = plane_steps(settings.radius, settings.grid).tolist()
    planes = loss_plane(
        subject.losses,
        weights,
        (first, second),
        steps,
        lambda row: progress("loss landscape", row, len(steps)),
    )
    whole = {ALL_SITES: np.mean(list(planes.values()), axis=0), **planes}
    return Landscape(tuple(steps), {place: tuple(map(tuple, plane.tolist())) for place, plane in whole.items()})


# -- similarity of layers ----------------------------------------------------------------------------------------


def _similarity(
    subject: _Subject, settings: AnalysisSettings, others: Sequence[ReferenceModel], progress: Progress
) -> tuple[Similarity, ...]:
    if not others:
        return ()
    seed = derive_seed(settings.seed, "places")

    def features(network: SegmentationNetwork) -> dict[str, torch.Tensor]:
        return layer_features(network, subject.images, settings.places, seed)

    own, found = features(subject.model.network), []
    for done, other in enumerate(others, start=1):
        theirs = features(other.network())
        layers = [layer for layer in own if layer in theirs]
        cka = cka_matrix({layer: own[layer] for layer in layers}, {layer: theirs[layer] for layer in layers})
        found.append(Similarity(other.name, other.kind, tuple(layers), tuple(map(tuple, cka.tolist()))))
        progress("similarity of layers", done, len(others))
    return tuple(found)
