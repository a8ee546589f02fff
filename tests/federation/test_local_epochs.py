"""Local work by epochs: passes over a site's own cases, whatever `local_steps` says."""

from __future__ import annotations

import pytest
from federations import make_coordinator, make_workers

from panorgan.errors import ConfigError
from panorgan.federation.settings import TrainingSettings
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.base import SiteRule


@pytest.mark.parametrize(
    ("epochs", "cases", "batch", "pooled", "steps"),
    [
        (None, 9, 2, 1, 20),  # local_steps
        (None, 9, 2, 3, 60),  # local_steps of three sites
        (1, 9, 2, 1, 5),  # the last batch of an epoch is not full: ⌈9 / 2⌉
        (10, 8, 2, 1, 40),
        (10, 1, 4, 1, 10),
        (2, 9, 2, 3, 10),  # the pooled site's nine cases are those of all three
    ],
)
def test_steps_by_hand(epochs, cases, batch, pooled, steps):
    training = TrainingSettings(local_epochs=epochs, sampling={"patch_size": (16, 16, 16), "batch_size": batch})
    assert training.steps_per_round(cases, pooled) == steps


def test_an_epoch_is_at_least_one(tiny):
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        tiny(training={"local_epochs": 0})
    assert "local_epochs" in caught.value.where


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
