"""The search for images in what a site sends can fail: methods that leak on purpose are found, or stopped by the guard.

What every registered method sends is searched in `test_every_method.py`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from federations import make_workers
from watching import Watched, leaks

from panorgan.anatomy import Vocabulary
from panorgan.config import Experiment
from panorgan.federation.egress import EgressPolicy, TensorRule, default_policy
from panorgan.federation.failures import EgressError
from panorgan.federation.message import Message
from panorgan.federation.tasks import Task
from panorgan.methods.base import Method, MethodConfig, Payload, SiteRule
from panorgan.methods.protocol import Federation, RoundInfo
from panorgan.networks import UNet
from panorgan.preparation.batch import Batch


@pytest.fixture
def short(tiny):
    """One round of training on voxels as they are stored: augmentation would only make them harder to recognise."""
    training = {"rounds": 1, "validate_every": 1, "local_steps": 2, "augment": None}
    return lambda **changes: tiny(training=training, **changes)


def _size(item: tuple[str, torch.Tensor]) -> int:
    return item[1].numel()


class Leaking(Method):
    """Remembers the last batch it saw and hides it in its update, as `how` says."""

    name = "leaking"
    how = ""

    class Site(SiteRule):
        """Leaks."""

        def step(self, batch: Batch) -> dict[str, torch.Tensor]:
            self.batch = batch
            return super().step(batch)

        def update(self) -> Payload:
            weights = {
                key: value.clone(memory_format=torch.contiguous_format)
                for key, value in self.model.state_dict().items()
            }
            numbers = {"cases": 1.0}
            image, mask = self.batch.image[0, 0], self.batch.masks[0]
            extra: dict[str, torch.Tensor] = {}
            how = Leaking.how
            if how == "a flattened patch, halved in precision":
                extra["map"] = (100 * image + 7).to(torch.float16).reshape(-1, 256)
            elif how == "a patch, negative and turned":
                extra["map"] = -image.permute(2, 0, 1).reshape(256, 16).contiguous()
            elif how == "rows inside the weights":
                key = max(weights.items(), key=_size)[0]
                rows = image.reshape(-1)[: weights[key].numel()]
                weights[key].view(-1)[: len(rows)] = 0.01 * rows
            elif how == "voxels as numbers":
                numbers |= {f"v/{i:03d}": float(v) for i, v in enumerate(image[8:10].reshape(-1)[:480])}
            elif how == "a packed mask":
                bits = mask.reshape(-1, 16**3).to(torch.uint8).numpy()
                extra["map"] = torch.from_numpy(np.packbits(bits, axis=1))
            elif how == "a mask as floats":
                extra["map"] = mask.to(torch.float32).reshape(-1, 64)
            elif how == "a patch":
                extra["map"] = self.batch.image
            return Payload({**weights, **extra}, numbers)


OPEN = EgressPolicy(
    weights=True,
    numbers=("*",),
    tensors={"map": TensorRule(max_dimensions=9, types=("uint8", "float16", "float32"))},
    failures=True,
)


def leaked(experiment: Experiment, folder: Path, how: str, policy: EgressPolicy = OPEN) -> set[str]:
    """What is found in one round of a method that leaks."""
    Leaking.how = how
    method = Leaking(MethodConfig())
    workers = make_workers(experiment, folder / "run", method)
    sites = {name: Watched(worker, policy, folder) for name, worker in workers.items()}
    facts = {name: worker.facts() for name, worker in workers.items()}
    task = Task("train", "run", RoundInfo("train", 1, 1), facts, experiment=experiment.agreement().fingerprint())
    for name, site in sites.items():
        network = method.build_network(experiment.network, Federation(workers[name].setup.vocabulary, facts))
        site.handle(Message(network.state_dict(), meta=task.to_meta()).to_bytes())
    return leaks(sites)


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("a flattened patch, halved in precision", {"map: image"}),
        ("a patch, negative and turned", {"map: image"}),
        ("rows inside the weights", {"WEIGHT: image"}),
        ("voxels as numbers", {"all numbers: image"}),
        ("a packed mask", {"map: mask"}),
        ("a mask as floats", {"map: mask"}),
    ],
)
def test_a_method_that_leaks_is_found(short, tmp_path, how, found):
    """Even where the policy is wide open and the shapes give nothing away."""
    experiment = short()
    largest = max(UNet(Vocabulary(experiment.vocabulary), experiment.network).state_dict().items(), key=_size)[0]
    assert leaked(experiment, tmp_path, how) == {what.replace("WEIGHT", largest) for what in found}


def test_a_method_that_does_not_leak_is_left_in_peace(short, tmp_path):
    assert leaked(short(), tmp_path, "nothing") == set()


@pytest.mark.parametrize("how", ["a patch", "voxels as numbers", "a packed mask", "a mask as floats"])
def test_the_guard_stops_what_was_not_declared(short, tmp_path, how):
    with pytest.raises(EgressError):
        leaked(short(), tmp_path, how, default_policy("fedavg"))


def test_the_guard_stops_a_patch_under_any_policy(short, tmp_path):
    with pytest.raises(EgressError, match="shape of an image"):
        leaked(short(), tmp_path, "a patch")
