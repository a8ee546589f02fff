"""Score the delivered model on a site's own test cases. Scores and predictions stay at the site."""

from __future__ import annotations

from collections.abc import Callable

from panorgan.config import load_agreement
from panorgan.deployment.folders import SiteKit
from panorgan.deployment.kit_files import load_site_file
from panorgan.errors import RunError
from panorgan.workflows.device import use_hardware
from panorgan.workflows.model_bundle import load_model
from panorgan.workflows.one_site import SiteFolder
from panorgan.workflows.scoring import score_case
from panorgan.workflows.tables import Row, write_metrics


def score_site(kit: SiteKit, on_case: Callable[[int, int], None] = lambda done, total: None) -> list[Row]:
    """One row per test case and structure, as in `metrics.csv`, which is written into the kit's `scores` folder."""
    require_model(kit)
    settings = load_site_file(kit)
    model = load_model(kit.model, use_hardware(settings.hardware))
    source = SiteFolder(settings.name, settings.data, load_agreement(kit.experiment), kit.cache(settings))
    cases = source.cases.test
    rows: list[Row] = []
    for done, case in enumerate(cases, start=1):
        rows += score_case(model, case, "test", kit.scores / "predictions")
        on_case(done, len(cases))
    write_metrics(kit.scores / "metrics.csv", rows)
    return rows


def require_model(kit: SiteKit) -> None:
    """Raise an error where the model has not arrived."""
    if not kit.model.is_dir():
        raise RunError(
            "The model has not been delivered yet.",
            code="model-not-delivered",
            where=str(kit.model),
            why="it arrives after the last round, while 'panorgan federation site' runs",
            fix="Ask the coordinator how far the run is.",
        )
