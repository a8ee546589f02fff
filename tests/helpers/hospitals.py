"""Hospitals on disk with as much of an approved kit as a site's machine reads: no certificates, no engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from panorgan.config import Experiment
from panorgan.deployment.approval import record
from panorgan.deployment.folders import SiteKit
from panorgan.federation.egress import default_policy, policy_text
from panorgan.workflows.site_cases import cache_folder, site_settings


def make_hospitals(folder: Path, experiment: Experiment) -> dict[str, SiteKit]:
    """A kit for every training site of an experiment, with a copy of its data in `<kit>/data` that may be changed."""
    agreement = experiment.agreement()
    kits = {}
    for name, site in site_settings(experiment, cache_folder(), lambda what, done, total: None).items():
        if site.external:
            continue
        kit = kits[name] = SiteKit(folder / name)
        kit.local.mkdir(parents=True)
        shutil.copytree(site.folder, kit.path / "data")
        kit.experiment.write_text(yaml.safe_dump(agreement.as_json()))
        kit.egress_policy.write_text(policy_text(default_policy(agreement.method["name"]), agreement.method["name"]))
        settings = {
            "federation": "pilot",
            "name": name,
            "server": "localhost:8443",
            "experiment_fingerprint": agreement.fingerprint(),
            "data": {"folder": "data"},
            "hardware": {"device": "cpu", "threads": 1, "workers": 1},
        }
        kit.settings.write_text(yaml.safe_dump(settings))
        record(kit)
    return kits
