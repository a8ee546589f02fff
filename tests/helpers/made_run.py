"""A scored run made by hand, of any number of sites, organs and cases: nothing is trained, there are no scans."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from panorgan.anatomy import catalogue
from panorgan.anatomy.vocabulary import Vocabulary
from panorgan.config import Experiment
from panorgan.errors import AnatomyError
from panorgan.federation.events import EventLog
from panorgan.workflows.tables import Row, write_metrics

SITES = ("north", "south", "island")
ORGANS = ("liver", "spleen")
OUTLIER = ("south", "south_1", "spleen", 0.1)
"""Site, case, organ and Dice of the worst score."""


def made_run(folder: Path, sites: Sequence[str] = SITES, organs: Sequence[str] = ORGANS, cases: int = 4) -> Path:
    """A run of `fedavg` whose last site is external; every other site labels every other organ."""
    folder.mkdir(parents=True)
    *trained, outside = sites
    annotated = {site: [o for i, o in enumerate(organs) if (i + n) % 2 == 0] for n, site in enumerate(trained)}
    experiment = Experiment(
        name="made by hand",
        vocabulary=tuple(organs),
        sites={site: {"folder": f"/nowhere/{n}", "external": site == outside} for n, site in enumerate(sites)},
    )
    manifest = {
        "run": "abc123",
        "created": "2025-03-04T05:06:07+0000",
        "experiment": experiment.as_json(),
        "fingerprint": "fp-experiment",
        "sites": {
            site: {
                "external": site == outside,
                "annotated": annotated.get(site, []),
                "cases": {"train": 3, "validation": 1, "test": cases},
            }
            for site in sites
        },
        "data_fingerprint": "fp-data",
        "versions": {"panorgan": "9.9.9", "torch": "2.0"},
        "git": None,
        "hardware": {"device": "cpu", "cores": 2},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    write_metrics(folder / "metrics.csv", made_rows(sites, organs, cases))
    EventLog(folder / "events.jsonl").record("started", run="abc123", method="fedavg")
    return folder


def made_rows(sites: Sequence[str], organs: Sequence[str], cases: int) -> list[Row]:
    """Dice between 0.6 and 0.95 but for the outlier; one liver was missed."""
    generator = np.random.default_rng(0)
    rows: list[Row] = []
    for site in sites:
        for case in range(cases):
            for organ in organs:
                dice = float(generator.uniform(0.6, 0.95))
                if (site, f"{site}_{case}", organ) == OUTLIER[:3]:
                    dice = OUTLIER[3]
                missed = (site, case, organ) == (sites[0], 0, organs[0])
                where = {"split": "external" if site == sites[-1] else "test", "site": site, "case": f"{site}_{case}"}
                rows.append({**where, "organ": organ, **_values(0.0 if missed else dice, missed)})
    return rows


def many_organs(count: int) -> tuple[str, ...]:
    """Organs of the catalogue that may stand in one vocabulary."""
    found: list[str] = []
    for organ in catalogue():
        try:
            Vocabulary((*found, organ))
        except AnatomyError:
            continue
        found.append(organ)
    return tuple(found[:count])


def _values(dice: float, missed: bool) -> dict[str, float]:
    distance = math.nan if missed else 10 * (1 - dice)
    overlaps = {"dice": dice, "jaccard": dice / (2 - dice), "nsd": dice, "sensitivity": dice, "specificity": 1.0}
    return {**overlaps, "hd": 3 * distance, "hd95": 2 * distance, "assd": distance, "rve": dice - 1}
