"""Public functions that need several rooms. `import panorgan` offers them along with those of single rooms."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from panorgan.config import Experiment
from panorgan.report.comparison import write_comparison
from panorgan.report.comparison_results import Results, compare_runs
from panorgan.workflows.compare import plan_comparison
from panorgan.workflows.model_bundle import Model, load_model
from panorgan.workflows.prediction import Prediction
from panorgan.workflows.run import Run
from panorgan.workflows.train_comparison import ComparisonObserver, train_missing

StrPath = str | os.PathLike[str]


def predict(
    model: StrPath | Run | Model,
    scan: StrPath | NDArray[Any],
    affine: NDArray[Any] | None = None,
    device: str | torch.device = "auto",
    organs: Sequence[str] | None = None,
) -> Prediction:
    """Segment one scan; for many, `load_model` once and call its `predict`.

    Parameters
    ----------
    model : a model, a run, a run folder or a model folder.
    scan : a NIfTI, MetaImage or NRRD file, a folder with one DICOM series, or voxels [X, Y, Z].
    affine : [4, 4] from voxel indices to RAS millimetres; with voxels only.
    device : auto, cpu or cuda; that of the model where one is given.
    organs : segment only these, such as ["liver", "kidney"]; all if left out.

    Returns
    -------
    Prediction : the label map [X, Y, Z] on the scan's own grid, with `mask(organ)` and `save(path)`.
    """
    loaded = model if isinstance(model, Model) else load_model(model, device)
    return loaded.predict(scan, affine, organs=organs)


def compare(
    experiment: Experiment,
    methods: str | Sequence[str],
    seeds: str | Sequence[int] = (0, 1, 2),
    folder: StrPath | None = None,
    *,
    reference: str | None = None,
    at_once: int = 1,
    report_only: bool = False,
    observer: ComparisonObserver | None = None,
    cache: StrPath | None = None,
) -> Results:
    """Train several methods with several seeds and compare them; continues where it was stopped.

    Parameters
    ----------
    experiment : from `load_experiment`; its method and seed are replaced.
    methods : such as `["solo", "fedprox+mu=0.1", "even=fedavg+weighting=uniform"]`, or the same with commas.
    seeds : each is another run of every method.
    folder : for all runs; `runs/<name>-compare` if left out.
    reference : the method that the others are tested against; fedavg, or the first.
    at_once : runs that train at the same time, each in its own process.
    report_only : train nothing; compare what is finished.
    observer : gets the progress of the runs.
    cache : where prepared cases are kept, as for `train`.

    Returns
    -------
    Results : `table` with every figure, `runs` by method, `failures`, and the `files` that were written.
    """
    place = None if cache is None else Path(cache)
    plan = plan_comparison(experiment, methods, seeds, reference, None if folder is None else Path(folder))
    failures = train_missing(plan, at_once, observer, place, report_only)
    results = compare_runs(plan, failures, place)
    write_comparison(results)
    return results
