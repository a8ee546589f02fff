"""Fine-tunes the delivered model at a hospital, on the data of its kit. Nothing leaves the hospital."""

from __future__ import annotations

from collections.abc import Sequence

from panorgan.config import Experiment
from panorgan.deployment.folders import SiteKit
from panorgan.deployment.kit_files import load_agreed, load_site_file
from panorgan.deployment.score import require_model
from panorgan.workflows.finetune import finetuning


def of_kit(kit: SiteKit, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment that fine-tunes the model in a kit with the hospital's own cases."""
    require_model(kit)
    settings = load_site_file(kit)
    agreement = load_agreed(kit, settings.experiment_fingerprint)
    return finetuning(agreement, kit.model, settings.name, settings.data, settings.hardware, overrides)
