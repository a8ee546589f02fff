"""Fine-tunes a delivered model on one site's own cases: an experiment with that site only, starting from the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from panorgan.agreement import Agreement
from panorgan.anatomy import Vocabulary
from panorgan.config import Experiment, HardwareSettings, SiteSettings, load_experiment
from panorgan.errors import ConfigError, did_you_mean
from panorgan.federation.start_settings import model_folder
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.workflows.model_bundle import Model, load_model
from panorgan.workflows.run import Run
from panorgan.workflows.scoring import score_case
from panorgan.workflows.site_cases import cache_folder, read_site, read_sites, site_settings
from panorgan.workflows.tables import Table, write_metrics

PLAIN = "fedavg"
START_SCORES = "start_metrics.csv"
"""Scores of the model to start from, on the test cases of the site."""


def of_run(run: Run, site: str | None, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment that fine-tunes a run's model at one of its sites; `site` may be None if there is only one."""
    known = run.experiment
    sites = site_settings(known, cache_folder(), lambda what, done, total: None)
    name = next(iter(sites)) if site is None and len(sites) == 1 else site
    if name is None or name not in sites:
        raise ConfigError(
            "Name the site to fine-tune at." if name is None else f"The run has no site {name!r}.",
            code="no-such-site",
            where="--site",
            why="" if name is None else did_you_mean(name, sites),
            fix=f"Use one of: {', '.join(sites)}.",
        )
    return finetuning(known.agreement(), run.path, name, sites[name], known.hardware, overrides)


def finetuning(
    agreement: Agreement,
    folder: Path,
    name: str,
    site: SiteSettings,
    hardware: HardwareSettings,
    overrides: Sequence[str] = (),
) -> Experiment:
    """The agreement's experiment with one site: its organs, the model's plan, a tenth of rounds and learning rate."""
    model = load_model(folder, "cpu")
    alone = site.model_copy(update={"external": False, "joins_at": None})
    training = agreement.training
    rounds = max(5, training.rounds // 10)
    changes = {
        "rounds": rounds,
        "validate_every": max(1, rounds // 5),
        "min_sites": 1,
        "aggregation": "mean",
        "optimizer": {**training.optimizer.as_json(), "learning_rate": training.optimizer.learning_rate / 10},
        "start_from": str(model_folder(folder)),
    }
    method = _method(model)
    content = {
        **agreement.as_json(),
        "name": f"{agreement.name}-{name}",
        "vocabulary": _organs_of(name, alone, agreement),
        "method": method,
        "network": _network(agreement, method),
        "plan": model.plan.as_json(),
        "training": {**training.as_json(), **changes},
        "sites": {name: alone.as_json()},
        "hardware": hardware.as_json(),
    }
    return load_experiment(content, overrides)


def score_start(run: Run) -> Table:
    """Score the model that a finished run started from on the run's own test cases; `start_metrics.csv` in its folder.

    Only the organs of the run are scored, even if the model knows others.
    """
    experiment = run.experiment
    start = experiment.training.start_from
    assert start is not None
    assert start.folder is not None
    model = load_model(start.folder)
    sites = read_sites(experiment, cache_folder(), lambda what, done, total: None)
    rows = [row for site in sites for case in site.test for row in score_case(model, case, "test", None)]
    write_metrics(run.path / START_SCORES, rows)
    return Table(rows)


def _method(model: Model) -> dict[str, Any]:
    """The model's method if it works with a single site; otherwise plain averaging, over one site."""
    card: Mapping[str, Any] = model.card["method"]
    kind = find_method(card["name"])
    method = kind(kind.Config(**{key: value for key, value in card.items() if key != "name"}))
    return dict(card) if len(method.stages(1)) == 1 and not kind.pooled else {"name": PLAIN}


def _network(agreement: Agreement, method: Mapping[str, Any]) -> dict[str, Any]:
    """The `network` section, including what the model's own method fixed."""
    if method["name"] == agreement.method["name"]:
        return agreement.network.as_json()
    return agreement.build_method().network_settings(agreement.network).as_json()


def _organs_of(name: str, site: SiteSettings, agreement: Agreement) -> list[str]:
    """The organs that the site's own labels cover."""
    vocabulary = Vocabulary(agreement.vocabulary)
    own = read_site(name, site, vocabulary, "annotated").own
    annotated = {structure: 1 for case in own for structure in case.annotated}
    return list(Federation(vocabulary, {name: SiteInfo(name, len(own), annotated)}).organs_of(name))
