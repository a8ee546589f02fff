"""Scans of several channels, such as the sequences of an MR examination: a file for each, or one 4-D file of all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.processing import resample_from_to
from numpy.typing import NDArray

from panorgan.data.formats import files_of
from panorgan.data.volume import Volume, as_finite, on_grid, read_stack, read_volume
from panorgan.errors import DataError, did_you_mean

# A channel that covers less of the first one's voxels is of another part of the body, or another patient's.
_LEAST_COVERED = 0.5


@dataclass(frozen=True)
class Channel:
    """One channel of a scan: a file, the folder of a DICOM series (`slices`), or one image (`index`) of a 4-D file."""

    name: str
    path: Path
    slices: tuple[Path, ...] = ()
    index: int | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files whose content decides the channel."""
        return self.slices or files_of(self.path)

    def recipe(self) -> str:
        """How the files become the channel; together with their content this decides it."""
        return "file" if self.index is None else f"image {self.index}"


def channel_files(channels: Sequence[Channel]) -> tuple[Path, ...]:
    """Every file once, in the order of the channels."""
    return tuple(dict.fromkeys(path for channel in channels for path in channel.files))


def plain_name(name: str) -> str:
    """Lower case, letters and digits only: `T1-ce` and `t1ce` are one channel."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def find_channel(name: str, found: Iterable[str]) -> str | None:
    """The spelling that a folder has for a channel."""
    return next((other for other in found if plain_name(other) == plain_name(name)), None)


def choose_channels(
    wanted: Sequence[str], found: Mapping[str, Mapping[str, Channel]], folder: Path, rename: Mapping[str, str]
) -> dict[str, tuple[Channel, ...]]:
    """The wanted channels of every case, in their order.

    Parameters
    ----------
    found : by case, its channels by the names that the folder uses.
    rename : what these names mean, where they differ from the wanted ones.
    """
    named = {case: {_meaning(name, rename): channel for name, channel in own.items()} for case, own in found.items()}
    there = sorted({name for own in named.values() for name in own})
    for name in wanted:
        if find_channel(name, there) is None:
            raise DataError(
                f"The folder has no channel {name!r}.",
                where=str(folder),
                why=f"its channels are {', '.join(there)}. {did_you_mean(name, there)}"
                if there
                else "it does not name the channels of its scans",
                fix=f"Say what its names mean with 'channels: {{<its name>: {name}}}' under the site."
                if there
                else "Name them in dataset.json (channel_names), or in a cases.csv with columns like image:t1.",
                code="unknown-channel",
            )
    missing = [(case, name) for case, own in named.items() for name in wanted if find_channel(name, own) is None]
    if missing:
        raise _missing(missing, folder)
    chosen = {}
    for case, own in named.items():
        chosen[case] = tuple(replace(own[find_channel(name, own) or ""], name=name) for name in wanted)
    return chosen


def _meaning(name: str, rename: Mapping[str, str]) -> str:
    spelt = find_channel(name, rename)
    return name if spelt is None else rename[spelt]


def _missing(missing: Sequence[tuple[str, str]], folder: Path) -> DataError:
    case, name = missing[0]
    more = len({case for case, _ in missing}) - 1
    return DataError(
        f"Case {case} has no channel {name}."
        + (f" {more} more {'cases lack' if more > 1 else 'case lacks'} one." if more else ""),
        where=str(folder),
        why="; ".join(f"{case}: {name}" for case, name in missing[:20]),
        fix="Add its file, leave the case out with 'leave_out' under the site, or train on the channels that all have.",
        code="channel-missing",
    )


# -- reading -----------------------------------------------------------------------------------------------------------


def read_channels(channels: Sequence[Channel], case: str = "") -> Volume:
    """All channels on the grid of the first one, checked to be finite.

    Axes may run another way. A channel on other voxels is resampled linearly in the world; its lowest value goes on
    where it does not reach.
    """
    volumes: list[Volume] = []
    stack: tuple[Path, list[Volume]] | None = None
    for channel in channels:
        if channel.index is None:
            volume = read_volume(channel.path, channel.slices)
        else:
            if stack is None or stack[0] != channel.path:
                stack = channel.path, read_stack(channel.path)
            volume = _image_of(stack[1], channel.path, channel.index, channel.name, case)
        volume = as_finite(volume, f"{channel.path} ({channel.name})")
        volumes.append(volume if not volumes else on_first_grid(volume, volumes[0], channel, case))
    first, *others = volumes
    return Volume(first.voxels, first.affine, tuple(volume.voxels for volume in others))


def on_first_grid(volume: Volume, first: Volume, channel: Channel, case: str = "") -> Volume:
    """A channel on the grid of the first one."""
    found = on_grid(volume, first)
    if found is not None:
        return found
    lowest = float(volume.voxels.min())
    whole = nib.Nifti1Image(np.ones(volume.voxels.shape, dtype=np.float32), volume.affine)
    place = (first.voxels.shape, first.affine)
    covered = float((np.asarray(resample_from_to(whole, place, order=0, cval=0.0).dataobj) > 0).mean())
    if covered < _LEAST_COVERED:
        raise DataError(
            f"Channel {channel.name} does not lie where the first channel does.",
            where=f"{channel.path} (case {case})" if case else str(channel.path),
            why=f"it covers {covered:.0%} of that scan",
            fix="Check that the file belongs to this patient and examination, and its header's orientation and origin.",
            code="channel-elsewhere",
        )
    image = nib.Nifti1Image(volume.voxels.astype(np.float32), volume.affine)
    moved: NDArray[Any] = np.asarray(resample_from_to(image, place, order=1, cval=lowest).dataobj, dtype=np.float32)
    return Volume(moved, first.affine)


def read_image_of(path: Path, index: int) -> Volume:
    """One image of a 4-D file."""
    return _image_of(read_stack(path), path, index, f"number {index + 1}", "")


def _image_of(stack: Sequence[Volume], path: Path, index: int, name: str, case: str) -> Volume:
    if index < len(stack):
        return stack[index]
    raise DataError(
        f"Case {case} has no channel {name}." if case else f"A file has no channel {name}.",
        where=str(path),
        why=f"it holds {len(stack)} {'images' if len(stack) > 1 else 'image'}; this would be number {index + 1}",
        fix="Export the file with all channels, or correct their list in dataset.json.",
        code="channel-missing",
    )
