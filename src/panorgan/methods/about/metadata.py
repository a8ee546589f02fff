"""The description of a method, from its own file: docstring, config fields, metadata, and what leaves a site.

All texts about methods (`panorgan methods`, docs/methods.md, reports) are taken from here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from pydantic import ValidationError

from panorgan.errors import ConfigError
from panorgan.methods.about.uploads import Upload, empty_network, example_federation, uploads
from panorgan.methods.about.words import as_yaml
from panorgan.methods.base import Method, MethodConfig
from panorgan.networks import UNetSettings
from panorgan.networks.settings import OrganParts

TRAIN = "train"
REQUIRED = "(required)"
_PROBED_NUMBERS = (0, 2)


@dataclass(frozen=True)
class FieldDescription:
    """One setting of a method. `default` is plain JSON; `paper` the published value, empty where there is none."""

    name: str
    type: str
    default: Any
    meaning: str
    paper: str


@dataclass(frozen=True)
class Variant:
    """A setting that changes what leaves a site, or in which stages; `setting` as in an experiment file."""

    setting: str
    sent: tuple[Upload, ...]


@dataclass(frozen=True)
class MethodDescription:
    """The description of a method.

    `summary` is one line; `title` and `explanation` are the first line of the method's file, `text` all of its
    docstring but the title. `pooled`: it gathers all cases in one place, which no real federation may do.
    """

    method: type[Method]
    name: str
    group: str
    summary: str
    title: str
    explanation: str
    text: str
    paper: str
    equations: Mapping[str, str]
    recipe: Mapping[str, object]
    fields: tuple[FieldDescription, ...]
    numbers: Mapping[str, str]
    tensors: Mapping[str, str]
    pooled: bool
    labels: Literal["annotated", "withheld"]

    @property
    def own_fields(self) -> tuple[FieldDescription, ...]:
        """Settings that other methods do not have, or have with another default, meaning or published value."""
        shared = fields_of(MethodConfig)
        return tuple(field for field in self.fields if field not in shared)

    # -- measured on an example federation, on first use ----------------------------------------------------

    @cached_property
    def sent(self) -> tuple[Upload, ...]:
        """What each site sends with the default settings; nothing where all cases are in one place."""
        config = self._config()
        return () if self.pooled or config is None else uploads(self.method(config))

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """Settings that change what is sent."""
        return () if self.pooled or self._config() is None else tuple(self._variants())

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages with the default settings, in order."""
        config = self._config()
        return () if config is None else tuple(stage.name for stage in self.method(config).stages(10))

    @property
    def optional_stages(self) -> tuple[str, ...]:
        """Names of stages that some setting adds."""
        found = {upload.stage: None for variant in self.variants for upload in variant.sent}
        return tuple(stage for stage in found if stage not in self.stages)

    @cached_property
    def network(self) -> OrganParts | Literal["any", "own"]:
        """How its network separates organs; `any`: the experiment decides; `own`: a network of this method."""
        if self.method.organs is not None:
            return self.method.organs
        config = self._config()
        if config is None:
            return "any"
        keys = [
            empty_network(self.method(config), UNetSettings(organs=organs), example_federation()).state_dict().keys()
            for organs in get_args(OrganParts)[:2]
        ]
        return "any" if keys[0] != keys[1] else "own"

    @property
    def network_words(self) -> str:
        """The first docstring line of the network it delivers; empty where the experiment decides."""
        config = self._config()
        if self.network == "any" or config is None:
            return ""
        built = empty_network(self.method(config), UNetSettings(), example_federation())
        return (inspect.getdoc(built) or "").split("\n")[0]

    # -- details -------------------------------------------------------------------------------------------

    def _config(self, **changes: Any) -> MethodConfig | None:
        """A config with changes; None if they are not allowed, or a setting has no default."""
        try:
            return self.method.Config.model_validate(changes)
        except (ValidationError, ConfigError):
            return None

    def _variants(self) -> Iterator[Variant]:
        seen = {_visible(self.sent)}
        for field in self.fields:
            for value in _other_values(self.method.Config, field):
                config = self._config(**{field.name: value})
                if config is None:
                    continue
                sent = uploads(self.method(config))
                if _visible(sent) not in seen:
                    seen.add(_visible(sent))
                    yield Variant(f"method.{field.name}: {as_yaml(value)}", sent)
        config = self._config()
        if self.network == "any" and config is not None:
            organs: OrganParts = "heads"
            sent = uploads(self.method(config), UNetSettings(organs=organs))
            if _visible(sent) not in seen:
                yield Variant(f"network.organs: {organs}", sent)


def describe(method: type[Method]) -> MethodDescription:
    """The description of a registered method; what it sends is measured once, on first use."""
    if method not in _described:
        _described[method] = _describe(method)
    return _described[method]


_described: dict[type[Method], MethodDescription] = {}


def _describe(method: type[Method]) -> MethodDescription:
    module = sys.modules.get(method.__module__)
    text = inspect.cleandoc(method.text or (module.__doc__ if module else None) or method.__doc__ or "")
    first, _, rest = text.partition("\n")
    title, dash, explanation = first.partition(" — ")
    summary = (inspect.getdoc(method) or "").split("\n")[0]
    return MethodDescription(
        method,
        method.name,
        method.group,
        summary,
        title if dash else method.name,
        explanation,
        f"{explanation if dash else first}\n{rest}".strip(),
        method.paper,
        dict(method.equations),
        dict(method.recipe),
        fields_of(method.Config),
        dict(method.numbers),
        dict(method.tensors),
        method.pooled,
        method.labels,
    )


def fields_of(config: type[MethodConfig]) -> tuple[FieldDescription, ...]:
    """Every field of a config, in the order of declaration."""
    schema = config.model_json_schema()
    properties, definitions = schema.get("properties", {}), schema.get("$defs", {})
    return tuple(
        FieldDescription(
            name,
            _type_words(properties[name], definitions),
            REQUIRED if field.is_required() else _plain(field.get_default(call_default_factory=True)),
            field.description or "",
            str(properties[name].get("paper", "")),
        )
        for name, field in config.model_fields.items()
    )


def _plain(value: Any) -> Any:
    """Plain JSON: tuples become lists, nested settings become objects."""
    if isinstance(value, tuple | list | set | frozenset):
        return [_plain(item) for item in value]
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _type_words(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A field's type and limits in readable form, from its JSON schema."""
    if "$ref" in schema:
        return _type_words(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "const" in schema:
        return f"only `{as_yaml(schema['const'])}`"
    if "enum" in schema:
        return " or ".join(f"`{as_yaml(value)}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type_words(option, definitions) for option in schema["anyOf"])
    kind = schema.get("type", "")
    if kind == "array":
        items = schema.get("items") or {}
        return f"list of: {_type_words(items, definitions)}" if items else "list"
    words = {"integer": "whole number", "boolean": "`true` or `false`", "string": "text", "object": "settings"}
    return " ".join([words.get(kind, "`null`" if kind == "null" else kind or "anything"), *_limits(schema)])


def _limits(schema: Mapping[str, Any]) -> list[str]:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {as_yaml(schema[key])}" for key, sign in signs.items() if key in schema]
    return [", ".join(found)] if found else []


def _other_values(config: type[MethodConfig], field: FieldDescription) -> list[Any]:
    """Values to try instead of the default: all of a choice; of numbers, off and on."""
    schema = config.model_json_schema()["properties"][field.name]
    options = schema.get("anyOf", [schema])
    values: list[Any] = []
    for option in options:
        kind = option.get("type")
        values += option.get("enum", [])
        values += [True, False] if kind == "boolean" else []
        values += _PROBED_NUMBERS if kind in ("integer", "number") else []
        values += [None] if kind == "null" else []
    return [value for value in values if value != field.default or type(value) is not type(field.default)]


def _visible(sent: tuple[Upload, ...]) -> tuple[object, ...]:
    """The parts that a reader sees."""
    return tuple((s.stage, s.rounds, s.words, round(s.relative, 2)) for s in sent)
