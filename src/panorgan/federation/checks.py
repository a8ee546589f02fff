"""What the coordinator accepts from a site. A bad answer is refused with its reason; the round goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from panorgan.errors import MessageError
from panorgan.federation.message import MessageFile
from panorgan.federation.tasks import Task


def check_answer(file: MessageFile, task: Task, site: str, expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse an answer to another question, from somebody else, with unknown keys, wrong shapes or bad values."""
    check_envelope(file.meta, task, site)
    if expected and not file.keys:
        raise MessageError(f"Site {site} sent no weights.")
    for key in file.keys:
        _check_tensor(file, key, site, expected)


def check_envelope(meta: Mapping[str, Any], task: Task, site: str) -> None:
    """Refuse an answer to another question, of another run, or in somebody else's name."""
    wanted = {"answers": task.label, "run": task.run, "site": site}
    for name, value in wanted.items():
        if meta.get(name) != value:
            raise MessageError(
                f"Site {site} sent an answer that does not belong here.",
                why=f"its {name!r} is {meta.get(name)!r}, expected {value!r}",
            )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity."""
    # A sum in double precision is finite exactly when every addend is: one pass, no mask in memory.
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum(dtype=torch.float64)))


def _check_tensor(file: MessageFile, key: str, site: str, expected: Mapping[str, torch.Tensor]) -> None:
    if key not in expected:
        raise MessageError(f"Site {site} sent an unknown key.", why=f"{key!r} is not part of the model")
    if file.shape(key) != tuple(expected[key].shape):
        raise MessageError(
            f"Site {site} sent a tensor of the wrong shape.",
            why=f"{key!r} has {file.shape(key)}, expected {tuple(expected[key].shape)}",
        )
    tensor = file.array(key)
    if tensor.dtype != expected[key].dtype:
        raise MessageError(
            f"Site {site} sent a tensor of the wrong type.",
            why=f"{key!r} is {tensor.dtype}, expected {expected[key].dtype}",
        )
    if not is_finite(tensor):
        raise MessageError(f"Site {site} sent values that are not finite.", why=f"NaN or infinity in {key!r}")
