"""Local work by epochs: passes over a site's own cases or their slices, whatever `local_steps` says."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from federations import make_coordinator, make_workers

from panorgan.errors import ConfigError
from panorgan.federation.settings import TrainingSettings
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.base import SiteRule
from panorgan.preparation.sampling import patches_per_pass
from panorgan.workflows.compare import plan_comparison
from panorgan.workflows.compare_costs import measure_costs
from panorgan.workflows.execute import train


@pytest.mark.parametrize(
    ("epochs", "one_pass", "batch", "pooled", "steps"),
    [
        (None, 9, 2, 1, 20),  # local_steps
        (None, 9, 2, 3, 60),  # local_steps of three sites
        (1, 9, 2, 1, 5),  # the last batch of an epoch is not full: ⌈9 / 2⌉
        (10, 8, 2, 1, 40),
        (10, 1, 4, 1, 10),
        (2, 9, 2, 3, 10),  # the pooled site's nine cases are those of all three
    ],
)
def test_steps_by_hand(epochs, one_pass, batch, pooled, steps):
    training = TrainingSettings(local_epochs=epochs, sampling={"patch_size": (16, 16, 16), "batch_size": batch})
    assert training.steps_per_round(one_pass, pooled) == steps


@pytest.mark.parametrize(
    ("patch", "expected"),
    [((16, 16, 16), 2), ((16, 16, 1), 9 + 11), ((1, 16, 16), 20 + 24), ((16, 1, 16), 30 + 28)],
)
def test_a_pass_over_slices_counts_them(patch, expected):
    cases = [SimpleNamespace(shape=shape) for shape in ((20, 30, 9), (24, 28, 11))]
    assert patches_per_pass(cases, patch) == expected


def test_an_epoch_is_at_least_one(tiny):
    with pytest.raises(ConfigError) as caught:
        tiny(training={"local_epochs": 0})
    assert "local_epochs" in caught.value.where


@pytest.mark.parametrize("method", ["fedavg", "central_partial"])
def test_a_run_on_slices_passes_over_all_of_them_and_the_comparison_knows(tiny, tmp_path, monkeypatch, method):
    """Two passes in batches of eight: as many steps as the slices of all scans make; the comparison counts as many."""
    training = {
        "rounds": 1,
        "validate_every": 0,
        "local_epochs": 2,
        "sampling": {"patch_size": [16, 16, 1], "batch_size": 8},
    }
    experiment = tiny(network={"dimensions": 2}, training=training)
    plan = plan_comparison(experiment, method, "0", folder=tmp_path)
    (run,) = plan.runs
    slices, done = {}, {}
    original = SiteRule.step

    def count(self, batch):
        slices[self.facts.name] = sum(case.image.shape[2] for case in self.tools.cases)
        done[self.facts.name] = done.get(self.facts.name, 0) + 1
        return original(self, batch)

    monkeypatch.setattr(SiteRule, "step", count)
    train(run.experiment, run.folder.path)
    assert done == {site: 2 * math.ceil(number / 8) for site, number in slices.items()}
    assert sum(slices.values()) > 20, "more than cases"
    plan = plan_comparison(experiment, method, "0", folder=tmp_path)
    assert measure_costs(plan)[method].steps == sum(done.values())


@pytest.mark.parametrize(
    ("method", "steps"), [("fedavg", {"north": 6, "south": 3}), ("central_partial", {"pooled": 9})]
)
def test_sites_with_more_cases_do_more_steps(tiny, tmp_path, monkeypatch, method, steps):
    """Three training cases in the north, two in the south, in batches of two; epochs win over local_steps."""
    phantom = {
        "sites": [
            {"name": "north", "annotated": ["liver"], "cases": 5, "spacing_mm": [12, 12, 12]},
            {"name": "south", "annotated": ["spleen", "kidney"], "cases": 4, "spacing_mm": [11, 11, 13]},
        ]
    }
    training = {"rounds": 1, "validate_every": 0, "local_steps": 50, "local_epochs": 3}
    experiment = tiny(phantom=phantom, training=training, method={"name": method})
    workers = make_workers(experiment, tmp_path)
    cases = {name: len(worker.data.train) for name, worker in workers.items()}
    assert cases == ({"north": 3, "south": 2} if method == "fedavg" else {"pooled": 5})
    done: dict[str, int] = {}
    original = SiteRule.step

    def count(self, batch):
        done[self.facts.name] = done.get(self.facts.name, 0) + 1
        return original(self, batch)

    monkeypatch.setattr(SiteRule, "step", count)
    make_coordinator(experiment, tmp_path, LocalTransport(workers)).run()
    assert done == steps
