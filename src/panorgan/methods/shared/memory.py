"""Rules that remember tensors from round to round. A mixin, placed before the rule that it extends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from panorgan.methods.protocol import Payload
from panorgan.methods.shared.prefixed import prefixed, under


class Remembers:
    """Tensors by key in attributes that begin empty, survive a restart and never travel.

    `memory` names the attributes, and the prefix of each in the rule's state; those of all base classes count.
    """

    memory: ClassVar[Mapping[str, str]] = {}

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        for attribute in self._prefixes():
            setattr(self, attribute, {})

    def state(self) -> Payload:
        """What is remembered, besides what the rule keeps."""
        whole: Payload = super().state()  # type: ignore[misc]
        own: dict[str, torch.Tensor] = {}
        for attribute, prefix in self._prefixes().items():
            own |= prefixed(prefix, getattr(self, attribute))
        return Payload({**whole.tensors, **own}, whole.scalars)

    def load_state(self, state: Payload) -> None:
        """Restore it."""
        super().load_state(state)  # type: ignore[misc]
        for attribute, prefix in self._prefixes().items():
            setattr(self, attribute, under(prefix, state.tensors))

    def _prefixes(self) -> dict[str, str]:
        return {name: prefix for kind in type(self).__mro__ for name, prefix in vars(kind).get("memory", {}).items()}
