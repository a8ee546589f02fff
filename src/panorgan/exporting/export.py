"""`panorgan.export`: write a delivered model in another form, as a whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from panorgan.errors import ConfigError, PanorganError, RunError, did_you_mean
from panorgan.exporting.check import Agreement
from panorgan.exporting.monai_bundle import write_bundle
from panorgan.exporting.nnunet_model import write_nnunet
from panorgan.exporting.onnx_file import write_onnx
from panorgan.federation.start_settings import IN_BUNDLE, model_folder
from panorgan.workflows.model_bundle import Model, load_model
from panorgan.workflows.model_card import CARD, data_licences, model_card
from panorgan.workflows.run import Run

FORMS = ("bundle", "onnx", "nnunet")


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes
    ----------
    to : bundle, onnx or nnunet.
    folder : where it is.
    check : how the exported network agrees with the model: `max_difference` of any probability, `voxels` compared, and
        how many were `decided_otherwise`; empty for nnunet, which panorgan cannot run.
    """

    to: str
    folder: Path
    check: Mapping[str, Any] = field(default_factory=dict)


def export(run: str | os.PathLike[str] | Run, to: str = "bundle", out: str | os.PathLike[str] | None = None) -> Export:
    """Write a delivered model for other software, and compare the result with the model where panorgan can run it.

    Parameters
    ----------
    run : a run, its folder, or a model folder.
    to : `bundle` (MONAI), `onnx`, or `nnunet` (a model folder of nnU-Net v2).
    out : a new or empty folder; `export/<to>` in the run folder if left out.

    Returns
    -------
    Export : the folder, and the agreement that was measured.
    """
    if to not in FORMS:
        raise ConfigError(
            f"A model cannot be exported to {to!r}.",
            code="unknown-export",
            fix=did_you_mean(to, FORMS) or f"Use one of: {', '.join(FORMS)}.",
        )
    place = run.path if isinstance(run, Run) else Path(run)
    model = load_model(place, torch.device("cpu"))
    target = place / "export" / to if out is None else Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunError(
            "The folder for the export exists and is not empty.",
            code="folder-not-empty",
            where=str(target),
            fix="Choose another folder with --out, or remove this one.",
        )
    scratch = target.absolute().with_name(f".{target.absolute().name}.incomplete")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        agreement = _written(to, model, scratch, _run_of(place), model_folder(place))
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            target.rmdir()
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Export(to, target, {} if agreement is None else asdict(agreement))


def _written(to: str, model: Model, folder: Path, run: Run | None, source: Path) -> Agreement | None:
    try:
        return _WRITERS[to](model, folder, run, source)
    except (PanorganError, OSError):
        raise
    except Exception as error:  # PyTorch's and ONNX's converters raise many kinds for an operation that they lack
        raise RunError(
            "The network cannot be written in this form.",
            code="network-not-exportable",
            where=f"--to {to}",
            why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            fix="Nothing was kept. Export to another form; of a network of your own, avoid sizes as Python numbers.",
        ) from error


def _run_of(place: Path) -> Run | None:
    """The run that a folder is, or that a model folder lies in; None where the model lies alone."""
    return next((run for run in (Run(place), Run(place.absolute().parent)) if run.started), None)


def _bundle(model: Model, folder: Path, run: Run | None, source: Path) -> Agreement:
    agreement = write_bundle(model, folder, model_card(model.card, run), data_licences(run))
    shutil.copytree(source, folder / IN_BUNDLE)  # so that panorgan can predict with it, and start from it
    return agreement


def _onnx(model: Model, folder: Path, run: Run | None, source: Path) -> Agreement:
    agreement = write_onnx(model, folder)
    _write_card(model, folder, run)
    return agreement


def _nnunet(model: Model, folder: Path, run: Run | None, source: Path) -> None:
    write_nnunet(model, folder)
    _write_card(model, folder, run)


def _write_card(model: Model, folder: Path, run: Run | None) -> None:
    (folder / CARD).write_text(model_card(model.card, run), encoding="utf-8")


_WRITERS: Mapping[str, Callable[[Model, Path, Run | None, Path], Agreement | None]] = {
    "bundle": _bundle,
    "onnx": _onnx,
    "nnunet": _nnunet,
}
