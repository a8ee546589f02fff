"""Estimates before a run begins how long it will take here, and proposes settings if that is too long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from panorgan.anatomy import Vocabulary
from panorgan.config import Experiment
from panorgan.federation.checkpoint import Checkpoints
from panorgan.federation.site import SiteWorker
from panorgan.methods.protocol import Federation
from panorgan.workflows.duration import LONG_SECONDS, Work, estimate
from panorgan.workflows.machine_size import Data, propose
from panorgan.workflows.prepare import PreparedFederation
from panorgan.workflows.rehearsal import first_trained, rehearse
from panorgan.workflows.run import Run


def duration_facts(
    experiment: Experiment, prepared: PreparedFederation, workers: Mapping[str, SiteWorker], run: Run
) -> dict[str, Any]:
    """The estimate for the remaining rounds, measured with the site that has the most cases."""
    facts = {name: worker.facts() for name, worker in workers.items()}
    federation = Federation(Vocabulary(experiment.vocabulary), facts)
    name = max(facts, key=lambda site: (facts[site].train_cases, site))
    setup = workers[name].setup
    speed = rehearse(setup, federation, name, workers[name].data)
    rounds_done = (Checkpoints(run.path / "checkpoints").peek() or (0, ()))[0]
    needed = estimate(experiment, Work.of(experiment, prepared, workers), speed, rounds_done)
    stages = experiment.build_method().stages(experiment.training.rounds)
    measured = first_trained(stages).name
    later = [stage.name for stage in stages if stage.name != measured and stage.local_steps != 0]
    found = {**needed.as_json(), "device": setup.device.type, "stage": measured, "later_stages": ", ".join(later)}
    if needed.is_long and not rounds_done:
        minutes = LONG_SECONDS / 60
        proposal = propose(experiment, lambda name: False, _data(prepared, facts), setup.device, minutes)
        if proposal.estimate.seconds < needed.seconds:
            found |= {"suits": dict(proposal.settings), "suits_seconds": round(proposal.estimate.seconds, 1)}
    return found


def _data(prepared: PreparedFederation, facts: Mapping[str, Any]) -> Data:
    """The prepared cases as `machine_size.propose` takes them."""
    cases = [case for site in prepared.training for case in (*site.train, *site.validation)]
    shape = np.median([case.shape for case in cases], axis=0)
    validation = sum(len(site.validation) for site in prepared.sites)
    test = sum(len(site.test) for site in prepared.sites)
    return Data((shape[0], shape[1], shape[2]), prepared.plan.spacing_mm, facts, validation, test)
