"""The starred form of a plain rule: the same rule on pseudo labels, as UFPS compares with. One line of data each."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, cast

from pydantic import create_model

from panorgan.methods.base import Method, MethodConfig
from panorgan.methods.fedavg import FedAvgConfig
from panorgan.methods.shared.composition import Piece, Preset
from panorgan.methods.shared.pseudo_labels import (
    PseudoLabelConfig,
    PseudoLabelMethod,
    PseudoLabelServer,
    PseudoLabelSite,
)
from panorgan.settings import Settings

PSEUDO_LABELS = Piece(PseudoLabelConfig, PseudoLabelSite, PseudoLabelServer, PseudoLabelMethod)


def starred(
    rule: type[Method] | Preset,
    title: str,
    words: str,
    more: str = "",
    in_ufps: bool = False,
    axis: Literal["local_step", "architecture"] = "local_step",
) -> Preset:
    """The preset of a plain rule on pseudo labels, called `<name>_pl`.

    `title` is the plain rule's; `words` end the sentence "FedAvg* …"; `more` is added to the description. `in_ufps`:
    whether it is in UFPS's tables.
    """
    plain = rule if isinstance(rule, Preset) else _as_preset(rule, axis)
    others = "one of UFPS's starred baselines" if in_ufps else "as UFPS's starred baselines are made"
    return replace(
        plain,
        name=f"{plain.name}_pl",
        title=f"{title}*",
        description=f"{title} on pseudo labels, {others}. See `{plain.name}`.{more and chr(10) * 2}{more}",
        summary=f"FedAvg* {words}.",
        paper=f"{title}* in Jiang et al., UFPS; {plain.paper}" if in_ufps else plain.paper,
        equations={f"{title}, {where}": what for where, what in plain.equations.items()},
        supervision=PSEUDO_LABELS,
    )


def _as_preset(rule: type[Method], axis: Literal["local_step", "architecture"]) -> Preset:
    """A plain rule as a row with one piece."""
    row = Preset(rule.name, title="", description="", summary="", paper=rule.paper, equations=rule.equations)
    piece = Piece(_own_settings(rule.Config), rule.Site, rule.Server, rule)
    return replace(row, local_step=piece) if axis == "local_step" else replace(row, architecture=piece)


def _own_settings(config: type[MethodConfig]) -> type[Settings]:
    """What a plain rule's config adds to FedAvg's: the settings that it inherits, and those that it declares."""
    kinds = config.__mro__
    pieces = [k for k in kinds if issubclass(k, Settings) and not issubclass(k, MethodConfig) and k is not Settings]
    own = [k for k in kinds if issubclass(k, MethodConfig) and not issubclass(FedAvgConfig, k)]
    fields = {name: config.model_fields[name] for kind in own for name in vars(kind).get("__annotations__", {})}
    settings = create_model(  # type: ignore[call-overload]
        f"{config.__name__}Alone",
        __base__=tuple(pieces) or Settings,
        **{name: (field.annotation, field) for name, field in fields.items()},
    )
    return cast(type[Settings], settings)
