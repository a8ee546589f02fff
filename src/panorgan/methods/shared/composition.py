"""Methods composed of pieces: one choice along each axis, and texts about them.

supervision × local step × server average × network × where the data lies. `presets` holds the choices and the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from pydantic import create_model

from panorgan.errors import ConfigError
from panorgan.methods.base import Method, MethodConfig, ServerRule, SiteRule
from panorgan.methods.registry import register
from panorgan.networks.settings import OrganParts
from panorgan.settings import Settings


@dataclass(frozen=True)
class Piece:
    """A choice along one axis: its settings, what it does at a site and at the server, and what it sends.

    Rules call `super()`: they come before the rules that they build on, a local step before the supervision whose loss
    it minimises. `method` declares what leaves a site (numbers, tensors, ranges); that of a supervision also what
    surrounds the rules (stages, network, labels).
    """

    settings: type[Settings] | None = None
    site: type[SiteRule] | None = None
    server: type[ServerRule] | None = None
    method: type[Method] = Method


PARTIAL_LABELS = Piece(MethodConfig)
"""Supervision by what each site annotates."""
PLAIN = Piece()
"""Along the other axes: the optimiser's own step, the mean over sites."""


@dataclass(frozen=True)
class Preset:
    """A method as a row of a table: its texts, then its pieces.

    Attributes
    ----------
    title, description : for the documentation; a description may have several paragraphs.
    summary : one line for tables.
    paper, equations, recipe : as in `Method`.
    group : as in `Method`; empty for that of the supervision.
    supervision, local_step, average : pieces; the plain ones are those of `Method`.
    architecture : a piece whose method builds a network of its own.
    organs : how the network separates organs; None leaves it to the experiment, or to the supervision.
    data : at the sites, or pooled in one place (possible only on a benchmark).
    """

    name: str
    title: str
    description: str
    summary: str
    paper: str
    equations: Mapping[str, str] = field(default_factory=dict)
    recipe: Mapping[str, object] = field(default_factory=dict)
    group: str = ""
    supervision: Piece = PARTIAL_LABELS
    local_step: Piece = PLAIN
    average: Piece = PLAIN
    architecture: Piece = PLAIN
    organs: OrganParts | None = None
    data: Literal["at sites", "pooled"] = "at sites"

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Outermost first: the average is over models that local steps train on the supervision."""
        return self.average, self.local_step, self.supervision, self.architecture


def compose(preset: Preset, module: str) -> type[Method]:
    """The method class of a preset in a module; not yet registered."""
    around = preset.supervision.method
    if preset.organs is not None and around.organs not in (None, preset.organs):
        raise ConfigError(
            f"The preset {preset.name!r} asks for {preset.organs}, but its supervision works on {around.organs} only.",
            code="preset-impossible",
            where=module,
            fix="Leave `organs` out, or choose another supervision.",
        )
    parts: dict[str, Any] = {
        "__doc__": preset.summary,
        "__module__": module,
        "text": f"{preset.title} — {preset.description}",
        "group": preset.group or around.group,
        "paper": preset.paper,
        "equations": preset.equations,
        "recipe": preset.recipe,
        "organs": preset.organs or around.organs,
        "pooled": preset.data == "pooled",
        "numbers": _join(piece.method.numbers for piece in reversed(preset.pieces)),
        "tensors": _join(piece.method.tensors for piece in reversed(preset.pieces)),
        "ranges": _join(piece.method.ranges for piece in reversed(preset.pieces)),
        "Site": _stack_rules("Site", SiteRule, [piece.site for piece in preset.pieces]),
        "Server": _stack_rules("Server", ServerRule, [piece.server for piece in preset.pieces]),
    }
    return type(preset.name, _distinct([piece.method for piece in preset.pieces]), parts)


def register_preset(preset: Preset, module: str) -> type[Method]:
    """Register it under its name."""
    return register(preset.name, config=config_of(preset))(compose(preset, module))


def config_of(preset: Preset) -> type[MethodConfig]:
    """The settings of all pieces in one class, those of the supervision first."""
    bases = tuple(piece.settings for piece in preset.pieces if piece.settings is not None)
    config = create_model(f"{preset.name}_config", __base__=bases, __doc__=f"Settings of {preset.name}.")
    return cast(type[MethodConfig], config)


def _distinct(kinds: Sequence[type]) -> tuple[type, ...]:
    """Each once, in order, without the base classes of others."""
    return tuple(one for one in dict.fromkeys(kinds) if not any(o is not one and issubclass(o, one) for o in kinds))


def _stack_rules(name: str, plain: type, rules: Iterable[type | None]) -> type:
    """One rule that stacks several, the first outermost."""
    bases = _distinct([rule for rule in rules if rule is not None]) or (plain,)
    return type(name, bases, {"__doc__": " · ".join((base.__doc__ or "").split("\n")[0] for base in bases)})


def _join(declared: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The declarations of all pieces, in order."""
    return {name: value for mapping in declared for name, value in mapping.items()}
