"""Groups files into scans of several channels, for a model that takes several channels."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib

from panorgan.data.channels import Channel, find_channel, plain_name
from panorgan.data.volume import Volume
from panorgan.errors import DataError

FilePath = str | os.PathLike[str]
_NUMBERED = re.compile(r"(?P<case>.+)_(?P<number>[0-9]{4})")
_HOW = (
    "Name the files of a scan <case>_0000, <case>_0001, … in this order, or <case>_<channel>; give one 4-D file; "
    "or say which is which: {example}."
)


def one_file(path: Path, channels: Sequence[str]) -> tuple[Channel, ...]:
    """All channels as images of one 4-D file."""
    return tuple(Channel(name, path, index=number) for number, name in enumerate(channels))


def is_paths(scan: object) -> bool:
    """Whether a scan is given as one or several files, rather than as voxels."""
    several = scan.values() if isinstance(scan, Mapping) else scan if isinstance(scan, list | tuple) else (scan,)
    return all(isinstance(one, str | os.PathLike) for one in several)


def channels_by_name(files: Any, channels: Sequence[str]) -> tuple[Channel, ...]:
    """A file for each channel of a model: a mapping by name, or a sequence in the model's order."""
    if not isinstance(files, Mapping):
        if len(files) != len(channels):
            raise _other_number(len(files), channels)
        files = dict(zip(channels, files, strict=True))
    unknown = [name for name in files if find_channel(name, channels) is None]
    missing = [name for name in channels if find_channel(name, files) is None]
    if unknown or missing:
        raise DataError(
            f"The model has no channel {unknown[0]}." if unknown else f"The scan has no channel {missing[0]}.",
            why=f"the model takes {', '.join(channels)}; given are {', '.join(files)}",
            fix="Give a file for each of the model's channels.",
            code="unknown-channel" if unknown else "channel-missing",
        )
    return tuple(Channel(name, Path(files[find_channel(name, files) or ""])) for name in channels)


def refuse_other_channels(volume: Volume, channels: Sequence[str]) -> None:
    """A scan must have as many channels as the model."""
    if len(volume.channels) != max(1, len(channels)):
        raise _other_number(len(volume.channels), channels)


def _other_number(count: int, channels: Sequence[str]) -> DataError:
    return DataError(
        f"The model takes {len(channels) or 1} channel{'s' * (len(channels) > 1)}, this scan has {count}.",
        why=f"its channels are {', '.join(channels)}" if channels else "",
        fix="Give all channels, in this order: an array [C, X, Y, Z], a file for each, or one 4-D file.",
        code="channels-differ",
    )


def group_files(
    files: Sequence[Path], channels: Sequence[str], leave_out: bool
) -> tuple[dict[str, tuple[Channel, ...]], int]:
    """Scans by name with their channels, and the number of files that belong to none.

    The name of a file gives its channel: `case_0001` or `case_t1ce`, or `t1ce` in a folder per case; a 4-D file has all
    channels. With `leave_out`, other files are counted; without, they are refused.
    """
    scans: dict[str, dict[str, Path]] = {}
    whole: dict[str, tuple[Channel, ...]] = {}
    others: list[Path] = []
    for path in files:
        if _images_in(path) == len(channels):
            whole[_stem(path)] = one_file(path, channels)
        elif (place := _place(path, channels)) is None:
            others.append(path)
        else:
            case, name = place
            if name in scans.setdefault(case, {}):
                raise DataError(
                    f"Two files are channel {name} of {case}.",
                    where=f"{scans[case][name]}\n{path}",
                    fix="Keep one of them.",
                    code="channel-file-twice",
                )
            scans[case][name] = path
    if others and (not leave_out or not (scans or whole)):
        raise DataError(
            f"Nothing says which channel a file is: {others[0].name}.",
            where="\n".join(str(path) for path in others[:20]),
            why=f"the model takes {', '.join(channels)}",
            fix=_HOW.format(example=" ".join(f"{name}=FILE" for name in channels)),
            code="channel-unclear",
        )
    for case, own in scans.items():
        missing = [name for name in channels if name not in own]
        if missing:
            raise DataError(
                f"Case {case} has no channel {missing[0]}.",
                where="\n".join(str(path) for path in own.values()),
                why=f"the model takes {', '.join(channels)}; there are {', '.join(n for n in channels if n in own)}",
                fix="Give the missing file, or leave the case out.",
                code="channel-missing",
            )
        whole[case] = tuple(Channel(name, own[name]) for name in channels)
    return dict(sorted(whole.items())), len(others)


def _images_in(path: Path) -> int:
    """The number of images in a NIfTI file, by its header; 1 if unknown."""
    try:
        image: Any = nib.load(path)
        shape = image.shape
    except Exception:  # other formats, and damaged files, which reading reports
        return 1
    return int(shape[3]) if len(shape) == 4 else 1


def _place(path: Path, channels: Sequence[str]) -> tuple[str, str] | None:
    """Case and channel of a file, by its name."""
    stem = _stem(path)
    numbered = _NUMBERED.fullmatch(stem)
    if numbered and int(numbered["number"]) < len(channels):
        return numbered["case"], channels[int(numbered["number"])]
    return channel_of(path, channels)


def channel_of(path: Path, channels: Sequence[str]) -> tuple[str, str] | None:
    """Case and channel of a file whose name ends with that of a channel."""
    stem = _stem(path)
    if (name := find_channel(stem, channels)) is not None:
        return path.resolve().parent.name, name
    for place in range(len(stem)):
        if stem[place] in "_-. " and place and (name := find_channel(stem[place:], channels)) is not None:
            return stem[:place], name
    return None


def _stem(path: Path) -> str:
    return re.sub(r"(\.nii(\.gz)?|\.mha|\.mhd|\.nrrd|\.nhdr)$", "", path.name)


def named_files(texts: Sequence[Path], channels: Sequence[str]) -> dict[str, Path]:
    """Files given as `t1=FILE`, by channel; empty if none are."""
    pairs = [str(text).partition("=") for text in texts]
    known = {plain_name(name): name for name in channels}
    found: dict[str, Path] = {}
    for written, equals, file in pairs:
        name = known.get(plain_name(written)) if equals else None
        if name in found:
            raise DataError(
                f"Two files are given for the channel {name}.",
                code="channel-file-twice",
                where=f"{found[name]}\n{file}",
                fix="Name one file per channel; predict one scan at a time.",
            )
        if name is not None:
            found[name] = Path(file)
    return found
