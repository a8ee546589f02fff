"""The channels that every case of a folder should have, and those that it has."""

from __future__ import annotations

from collections.abc import Mapping

from panorgan.data.channels import Channel, choose_channels
from panorgan.data.layouts.base import FoundImage
from panorgan.data_doctor.opened_source import OpenedSource
from panorgan.errors import DataError


def channels_of(opened: OpenedSource, images: Mapping[str, FoundImage]) -> dict[str, tuple[Channel, ...]]:
    """The channels to check, by case; cases that lack one get a finding, and what they have is checked."""
    source = opened.source
    if not source.channels and source.vocabulary is not None:
        return {}  # an experiment that uses the first channel
    there = list(dict.fromkeys(name for image in images.values() for name in image.channels))
    wanted = source.channels or (tuple(there) if len(there) > 1 else ())
    rename = source.channel_names if source.channels else {}
    found: dict[str, tuple[Channel, ...]] = {}
    for name in wanted:
        try:
            choose_channels((name,), {case: image.channels for case, image in images.items()}, source.folder, rename)
        except DataError as error:
            if error.code == "unknown-channel":
                opened.add(error.code, error.what, error.why, error.fix, error.where)
                return {}
    for case, image in images.items():
        own: list[Channel] = []
        for name in wanted:
            try:
                own += choose_channels((name,), {case: image.channels}, source.folder, rename)[case]
            except DataError:
                fix = "Add its file, or leave the case out with 'leave_out' under the site."
                has = f"it has {', '.join(image.channels) or 'none'}"
                opened.add("channel-missing", f"The case has no channel {name}.", has, fix, image.path, case)
        found[case] = tuple(own)
    return found
