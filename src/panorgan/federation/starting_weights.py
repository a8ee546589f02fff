"""First weights from another model: what has the same name and shape is taken, organs are matched by their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from panorgan.errors import ConfigError
from panorgan.networks import SegmentationNetwork, UNet, UNetSettings
from panorgan.networks.organ_parts import group_of, group_of_key
from panorgan.networks.unet import OUTPUT_KEYS

_SHAPE = ("dimensions", "input_channels", "features", "norm", "weight_standardisation", "residual", "level_strides")
"""What decides the shapes of a network's shared weights."""


@dataclass(frozen=True)
class Taken:
    """What first weights were taken from a model, and what begins as usual: organs by name, all else by part."""

    tensors: int
    of: int
    organs: tuple[str, ...]
    fresh_organs: tuple[str, ...]
    fresh_parts: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types, for the log."""
        return {
            "taken": self.tensors,
            "of": self.of,
            "organs": list(self.organs),
            "fresh_organs": list(self.fresh_organs),
            "fresh_parts": list(self.fresh_parts),
        }

    def in_words(self) -> str:
        """`Taken: 34 of 36 weights, with liver, spleen. Begins as usual: pancreas.`"""
        organs = f", with {_names(self.organs)}" if self.organs else ""
        fresh = [*self.fresh_organs, *(part for part in self.fresh_parts if ":" not in part)]
        begins = f" Begins as usual: {_names(fresh)}." if fresh else ""
        return f"Taken: {self.tensors} of {self.of} weights{organs}.{begins}"


def take_over(network: SegmentationNetwork, start: SegmentationNetwork) -> tuple[dict[str, torch.Tensor], Taken]:
    """A network's weights with those of another model wherever both have them.

    The members of a merged network (`solo`) start from the same member of the other model, or from the whole of it.
    """
    weights = {key: value.detach().clone() for key, value in network.state_dict().items()}
    theirs, rows, their_rows = start.state_dict(), dict(_output_rows(network)), dict(_output_rows(start))
    fresh: set[str] = set()
    known: set[str] = set()
    for key in weights:
        source = _counterpart(key, theirs)
        if source is None:
            fresh.add(key)
        elif key in rows or source in their_rows:  # in one network alone, a layer of that name may have organs' rows
            same = key in rows and source in their_rows and network.activation == start.activation
            shared = _copy_rows(weights[key], rows[key], theirs[source], their_rows[source]) if same else ()
            known.update(shared)
            if not shared:
                fresh.add(key)
        elif weights[key].shape == theirs[source].shape:
            weights[key] = theirs[source].detach().clone()
        else:
            shapes = f"{key} is {list(theirs[source].shape)} there and {list(weights[key].shape)} here"
            raise _other_network(shapes, "method and network")
    if len(fresh) == len(weights):
        raise _other_network("no weight has the same name in both", "method and network")
    return weights, _report(network, weights, fresh, known)


def refuse_other_shape(network: UNetSettings, start: UNetSettings) -> None:
    """Refuse a model whose network has another shape: none of its features would fit."""
    for name in _SHAPE:
        here, there = getattr(network, name), getattr(start, name)
        if here != there:
            setting = "strides" if name == "level_strides" else name
            raise _other_network(f"network.{setting} is {_plain(there)} there and {_plain(here)} here", "network")


def _other_network(why: str, section: str) -> ConfigError:
    return ConfigError(
        "The model to start from has another network.",
        code="start-other-network",
        where="training.start_from",
        why=why,
        fix=f"Copy the section '{section}' of its experiment (manifest.json of its run, or model.json), or leave "
        "training.start_from out.",
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(name.replace("_", " ") for name in names)


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _counterpart(key: str, theirs: Mapping[str, torch.Tensor]) -> str | None:
    """The other model's weight of that name; `members.site-north.encoder.…`, and a site's own layer in a network for
    all, `encoder.….norm1.site-north.weight`, may start from the one that has no such parts."""
    if key in theirs:
        return key
    whole = ".".join(part for part in key.removeprefix("members.").split(".") if not part.startswith("site-"))
    return whole if whole in theirs else None


def _output_rows(network: SegmentationNetwork) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every weight with one row per channel, and the channels; also inside a merged network."""
    for name, module in network.named_modules():
        if isinstance(module, UNet):
            for key in OUTPUT_KEYS:
                yield f"{name}.{key}" if name else key, module.channels


def _copy_rows(
    target: torch.Tensor, channels: tuple[str, ...], source: torch.Tensor, theirs: tuple[str, ...]
) -> tuple[str, ...]:
    """Copy the rows of the channels that both have; returns those. Other rows stay."""
    if target.shape[1:] != source.shape[1:]:
        return ()
    shared = tuple(channel for channel in channels if channel in theirs)
    for channel in shared:
        target[channels.index(channel)] = source[theirs.index(channel)]
    return shared


def _report(
    network: SegmentationNetwork, weights: Mapping[str, torch.Tensor], fresh: set[str], known: set[str]
) -> Taken:
    """Organs by their rows, or by their parts; parts without any weight taken."""
    parts = {name: keys for name, keys in network.parts().items() if name != "norm"}
    begun = tuple(name for name, keys in parts.items() if keys and fresh.issuperset(keys))
    if any(group_of_key(key) for key in weights):
        groups = {group for key in weights if key not in fresh and (group := group_of_key(key))}
        known = {organ for organ in network.vocabulary if group_of(organ)[0] in groups}
    organs = tuple(organ for organ in network.vocabulary if organ in known)
    others = tuple(organ for organ in network.vocabulary if organ not in known)
    return Taken(len(weights) - len(fresh), len(weights), organs, others, begun)
