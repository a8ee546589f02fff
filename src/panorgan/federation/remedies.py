"""Settings against lost or flooding organs (see docs/experiment-file.md) that a run does not use yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from panorgan.methods.base import Method, MethodConfig
from panorgan.networks import UNetSettings

_RARE = 0.05


@dataclass(frozen=True)
class Remedies:
    """Suggested settings, as written in an experiment: against organs that are `lost`, and that flood."""

    lost: tuple[str, ...] = ()
    floods: tuple[str, ...] = ()

    @classmethod
    def of(cls, method: Method, network: UNetSettings) -> Remedies:
        """Of the usual settings, those that this experiment does not use and its method allows."""
        network = method.network_settings(network)
        unlabelled = tuple(_unless_set(method.config, "unlabelled", "received"))
        rare = network.organ_prior is not None and network.organ_prior <= _RARE
        return cls(
            (*unlabelled, *_unless_set(method.config, "dice_over", "batch")),
            (
                *unlabelled,
                *_unless_set(method.config, "organ_parts", "owners"),
                *(() if rare else (f"network.organ_prior: {_RARE}",)),
            ),
        )


def _unless_set(config: MethodConfig, name: str, value: str) -> Iterator[str]:
    allowed = get_args(type(config).model_fields[name].annotation)
    if value in allowed and getattr(config, name) != value:
        yield f"method.{name}: {value}"
