"""Checks scans of several channels: that each is usable, and that all show the same place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from panorgan.data.channels import Channel, on_first_grid
from panorgan.data.volume import Volume, on_grid
from panorgan.data_doctor import intensity
from panorgan.data_doctor.files import Problem, look
from panorgan.data_doctor.labels import content_hash
from panorgan.errors import DataError

_DECLARED = "the channel's name"


def check_channels(
    channels: Sequence[Channel], first: Volume | None, modality: str, repair: str
) -> Iterator[tuple[Channel, Problem]]:
    """Problems of the channels after the first one, which is checked as the scan itself."""
    seen = {content_hash(first.voxels): channels[0].name} if first is not None and len(channels) > 1 else {}
    for channel in channels[1:]:
        volume, problems = look(channel.path, repair, channel.slices, channel.index)
        yield from ((channel, _named(problem, channel)) for problem in problems)
        if volume is None:
            continue
        problem = _check_values(volume, modality) or (_check_place(volume, first, channel) if first else None)
        if problem is not None:
            yield channel, _named(problem, channel)
        content = content_hash(volume.voxels)
        if content in seen:
            why = "one of the two files is a copy of the other"
            what = f"It holds the same voxels as {seen[content]}."
            twice = Problem("channel-twice", what, why, "Export the right sequence, or leave one of the channels out.")
            yield channel, _named(twice, channel)
        seen.setdefault(content, channel.name)


def _named(problem: Problem, channel: Channel) -> Problem:
    return replace(problem, what=f"Channel {channel.name}: {problem.what}")


def _check_values(volume: Volume, modality: str) -> Problem | None:
    finite = np.isfinite(volume.voxels)
    if not finite.all():
        why = f"{int((~finite).sum())} voxels are NaN or infinite"
        return Problem("not-finite", "It holds values that are not finite numbers.", why, "Export it again.")
    values = intensity.measure(volume.voxels)
    if values.low == values.high:
        why = f"every voxel is {values.low:.5g}"
        return Problem("constant-image", "It shows nothing.", why, "Export it again, or leave the case out.")
    return intensity.check_mr(values, _DECLARED) if modality == "MR" else None


def _check_place(volume: Volume, first: Volume, channel: Channel) -> Problem | None:
    if on_grid(volume, first) is not None:
        return None
    try:
        on_first_grid(volume, first, channel)
    except DataError as error:
        return Problem("channel-elsewhere", error.what, error.why, error.fix)
    shapes = [" × ".join(str(n) for n in some.voxels.shape) for some in (volume, first)]
    return Problem(
        "channel-resampled",
        "It has other voxels than the first channel.",
        f"{shapes[0]} against {shapes[1]}, or another place in the body; it is resampled to them linearly",
        "Nothing, if both lie in one scanner's coordinates; else register them first.",
    )
