"""From a finished run to the model it delivers."""

from __future__ import annotations

import shutil
from typing import Any

from panorgan.cases.preprocess import Plan
from panorgan.config import Agreement
from panorgan.federation.coordinator import Coordinator
from panorgan.runs.delivered import save_model
from panorgan.runs.folder import RunFolder


def deliver(run: RunFolder, experiment: Agreement, plan: Plan, coordinator: Coordinator) -> dict[str, Any]:
    """Write the model folder: the chosen round's weights and a card, which is returned.

    What only further rounds would need goes: answers, and teachers (of N sites, N at each of them).
    """
    chosen, weights = coordinator.delivered_weights()
    best = coordinator.state.best
    method = experiment.build_method()
    network = method.build_network(experiment.network, coordinator.federation)
    card: dict[str, Any] = {
        "name": experiment.name,
        "organs": list(experiment.vocabulary),
        "channels": list(network.channels),
        "convention": network.convention,
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
    }
    save_model(run.model, weights, card)
    for spent in (run.path / "spool", coordinator.vault.folder, *run.path.glob("sites/*/vault")):
        shutil.rmtree(spent, ignore_errors=True)
    return card
