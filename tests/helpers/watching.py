"""Sites whose answers are kept as they leave, and traces of their images to look for in them.

Two checks of content that survive a change of type, scale and offset. *Images*: sixteen voxels in a row have 16!
possible orders; a tensor that holds the same order of values as a row of an image, several times, holds the image.
*Masks*: blocks of 8 × 8 × 8 bits. What they do not see: an image that was resampled, encrypted or learnt by heart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from federations import make_coordinator, make_workers
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from panorgan.config import Experiment
from panorgan.federation.audit import AuditLog
from panorgan.federation.egress import Egress, EgressPolicy, image_shapes, image_test, weights_of_site
from panorgan.federation.message import Message
from panorgan.federation.site import SiteWorker
from panorgan.federation.tasks import Task
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.protocol import Federation
from panorgan.preparation.store import StoredCase

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


_known: dict[Path, tuple[set[bytes], set[bytes]]] = {}


def _of_case(case: StoredCase) -> tuple[set[bytes], set[bytes]]:
    """Rows of a prepared case's image and blocks of its masks; all runs of a session share its prepared cases."""
    if case.folder not in _known:
        image = np.asarray(case.image, dtype=np.float32)
        masks = [blocks(np.asarray(mask)) for _, mask in case.masks()]
        _known[case.folder] = row_orders(image) | row_orders(-image), set().union(*masks)
    return _known[case.folder]


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
            rows, masks = _of_case(case)
            traces.rows |= rows
            traces.blocks |= masks
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


def watched_run(experiment: Experiment, folder: Path, policy: EgressPolicy) -> dict[str, Watched]:
    """A whole run; its sites with all that they have sent."""
    workers = make_workers(experiment, folder / "run")
    sites = {name: Watched(worker, policy, folder) for name, worker in workers.items()}
    make_coordinator(experiment, folder / "run", LocalTransport(sites)).run()
    return sites


def traces_of(sites: Mapping[str, Watched]) -> dict[str, Traces]:
    patch = next(iter(sites.values())).worker.setup.training.sampling.patch_size
    return {name: Traces.of(site.cases, patch) for name, site in sites.items()}


def leaks(sites: Mapping[str, Watched]) -> set[str]:
    traces = traces_of(sites)
    return {what for name, site in sites.items() for _, message in site.sent for what in traces[name].found_in(message)}
