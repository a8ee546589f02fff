"""No image leaves a site: every registered method, everything it sends, against every image that the site holds.

Two checks of content that survive a change of type, scale and offset. *Images*: sixteen voxels in a row have 16!
possible orders; a tensor that holds the same order of values as a row of an image, several times, holds the image.
*Masks*: blocks of 8 × 8 × 8 bits. Methods that leak on purpose show that the checks can fail. What they do not see:
an image that was resampled, encrypted or learnt by heart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import make_coordinator, make_workers
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from panorgan.anatomy import Vocabulary
from panorgan.config import Experiment
from panorgan.federation.audit import AuditLog, verify
from panorgan.federation.egress import (
    Egress,
    EgressPolicy,
    TensorRule,
    default_policy,
    image_shapes,
    image_test,
    weights_of_site,
)
from panorgan.federation.failures import EgressError
from panorgan.federation.message import Message
from panorgan.federation.site import SiteWorker
from panorgan.federation.tasks import Task
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.base import Method, MethodConfig, Payload, SiteRule
from panorgan.methods.protocol import Federation, RoundInfo
from panorgan.methods.registry import methods
from panorgan.networks import UNet
from panorgan.preparation.batch import Batch
from panorgan.preparation.store import StoredCase

FEDERATED = [name for name, method in methods().items() if not method.pooled]
# Rows of so many voxels; a patch of the tiny federation is sixteen wide.
_ROW = 16
# A single row may agree by chance, though hardly ever.
_FEWEST_ROWS = 2
_BLOCK = 8


# -- traces of images ----------------------------------------------------------------------------------------------


def row_orders(values: NDArray[np.generic]) -> set[bytes]:
    """The order of values in every row of sixteen along every axis, where all differ and do not just rise or fall."""
    found: set[bytes] = set()
    for axis, size in enumerate(values.shape):
        if size < _ROW:
            continue
        rows = sliding_window_view(values, _ROW, axis=axis).reshape(-1, _ROW)
        order = np.argsort(rows, axis=1, kind="stable").astype(np.uint8)
        ordered = np.take_along_axis(rows, order.astype(np.intp), axis=1)
        steps = np.diff(order.astype(np.int8), axis=1)
        telling = (ordered[:, 1:] > ordered[:, :-1]).all(1) & (steps > 0).any(1) & (steps < 0).any(1)
        found.update(row.tobytes() for row in np.unique(order[telling], axis=0))
    return found


def blocks(bits: NDArray[np.bool_]) -> set[bytes]:
    """Every block of 8 × 8 × 8 voxels that shows some of both sides of a mask's surface."""
    windows = sliding_window_view(bits, (_BLOCK,) * 3).reshape(-1, _BLOCK**3)
    inside = windows.sum(1)
    telling = windows[(inside >= 32) & (inside <= _BLOCK**3 - 32)]
    return {row.tobytes() for row in np.packbits(telling, axis=1)}


@dataclass
class Traces:
    """What a site's images and masks look like, in order to find them again."""

    patch: tuple[int, int, int]
    rows: set[bytes] = field(default_factory=set)
    blocks: set[bytes] = field(default_factory=set)
    shapes: set[tuple[int, ...]] = field(default_factory=set)

    @classmethod
    def of(cls, cases: list[StoredCase], patch: tuple[int, int, int]) -> Traces:
        traces = cls(patch, shapes=image_shapes(cases, patch))
        for case in cases:
            image = np.asarray(case.image, dtype=np.float32)
            traces.rows |= row_orders(image) | row_orders(-image)
            for _, mask in case.masks():
                traces.blocks |= blocks(np.asarray(mask))
        assert len(traces.rows) > 1000, "the images have too little to recognise them by"
        assert len(traces.blocks) > 1000, "the masks have too little to recognise them by"
        return traces

    def found_in(self, message: Message) -> list[str]:
        """What of an answer shows an image or a mask."""
        tensors = {key: value.to(torch.float32).numpy() for key, value in message.tensors.items()}
        tensors["all numbers"] = np.array(list(message.scalars.values()), dtype=np.float32)
        is_image = image_test(self.shapes)
        found = [f"{key}: shape" for key, value in message.tensors.items() if is_image(value)]
        for key, values in tensors.items():
            if len((row_orders(values) | row_orders(values.ravel())) & self.rows) >= _FEWEST_ROWS:
                found.append(f"{key}: image")
            if any(blocks(volume) & self.blocks for volume in self._volumes(values)):
                found.append(f"{key}: mask")
        return found

    def _volumes(self, values: NDArray[np.float32]) -> Iterator[NDArray[np.bool_]]:
        """Patches and volumes that the values may be, if they are masks: one voxel per value, or eight per byte."""
        flat = values.ravel()
        readings = [flat > flat.min()] if len(np.unique(flat)) == 2 else []
        if flat.size and flat.min() >= 0 and flat.max() <= 255 and (flat == np.round(flat)).all():
            readings += [np.unpackbits(flat.astype(np.uint8), bitorder=order) for order in ("big", "little")]
        for bits in readings:
            for shape in self.shapes:
                voxels = int(np.prod(shape))
                for start in range(0, bits.size - voxels + 1, voxels):
                    yield bits[start : start + voxels].astype(bool).reshape(shape)


# -- a federation whose sites are watched ----------------------------------------------------------------------------


class Watched:
    """A site whose answers pass the guard, as they do between hospitals; keeps what left."""

    def __init__(self, worker: SiteWorker, policy: EgressPolicy, folder: Path) -> None:
        self.worker, self.sent = worker, list[tuple[Task, Message]]()
        self.log = folder / f"{worker.name}.jsonl"
        data, setup = worker.data, worker.setup
        self.cases = [*data.train, *data.validation]
        shapes = image_shapes(self.cases, setup.training.sampling.patch_size)
        self.egress = Egress(policy, {}, AuditLog(self.log), shapes)

    def handle(self, request: bytes) -> bytes:
        task, setup = Task.from_meta(Message.from_bytes(request).meta), self.worker.setup
        if task.sites:
            federation = Federation(setup.vocabulary, task.sites)
            self.egress.known_weights = weights_of_site(setup.method, setup.network, federation, self.worker.name)
        answer = self.worker.handle(request)
        self.egress.release(answer, task.kind, task.round_info.round, task.round_info.stage)
        self.sent.append((task, Message.from_bytes(answer)))
        return answer


def watched_run(
    experiment: Experiment, folder: Path, policy: EgressPolicy, method: Method | None = None
) -> dict[str, Watched]:
    """Join, one round of every stage and a validation."""
    workers = make_workers(experiment, folder / "run", method)
    sites = {name: Watched(worker, policy, folder) for name, worker in workers.items()}
    make_coordinator(experiment, folder / "run", LocalTransport(sites), method=method).run()
    return sites


@pytest.fixture
def short(tiny):
    """One round of training on voxels as they are stored: augmentation would only make them harder to recognise."""
    training = {"rounds": 1, "validate_every": 1, "local_steps": 2, "augment": None}
    return lambda **changes: tiny(training=training, **changes)


def traces_of(sites: Mapping[str, Watched]) -> dict[str, Traces]:
    patch = next(iter(sites.values())).worker.setup.training.sampling.patch_size
    return {name: Traces.of(site.cases, patch) for name, site in sites.items()}


def leaks(sites: Mapping[str, Watched]) -> set[str]:
    traces = traces_of(sites)
    return {what for name, site in sites.items() for _, message in site.sent for what in traces[name].found_in(message)}


# -- every method ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEDERATED)
def test_all_that_a_method_sends_is_declared_and_shows_no_image(short, tmp_path, name):
    experiment = short(method={"name": name})
    sites = watched_run(experiment, tmp_path, default_policy(name))
    stages = {stage.name for stage in experiment.build_method().stages(1)}
    for site in sites.values():
        kinds = {task.kind for task, _ in site.sent}
        assert kinds == {"join", "train", "evaluate"}
        assert {task.round_info.stage for task, _ in site.sent if task.kind == "train"} == stages
        assert any(message.tensors for task, message in site.sent if task.kind == "train")
        report = verify(site.log)
        assert report.ok
        assert report.entries == len(site.sent)
    assert leaks(sites) == set()


@pytest.mark.parametrize("name", FEDERATED)
def test_every_declared_tensor_comes_with_a_sentence(name):
    for pattern, sentence in methods()[name].tensors.items():
        assert pattern not in ("", "*"), "say which"
        assert sentence.endswith("."), f"{pattern}: a sentence for the hospital"
        assert len(sentence) > 20


# -- the checks can fail ---------------------------------------------------------------------------------------------


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
