"""The base of every config section: immutable, typed, and strict about names.

Each room declares its own section next to the code that uses it; `panorgan.config` composes them into an experiment.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict


class SettingError(ValueError):
    """What a validator raises: why a setting cannot be used. `config.validated` makes a ConfigError with its code."""

    def __init__(self, why: str, *, code: str = "bad-setting") -> None:  # a default: an error is pickled without it
        super().__init__(why)
        self.code = code


class Settings(BaseModel):
    """A frozen pydantic model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types, in declaration order."""
        return self.model_dump(mode="json")


def fields_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Names of the settings at a place inside a model."""
    current: Any = model
    for key in path:
        if isinstance(current, type) and issubclass(current, BaseModel) and key in current.model_fields:
            current = _model_in(current.model_fields[key].annotation)
        # A list index or a mapping's key leads to the same inner model.
    return sorted(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def _model_in(annotation: Any) -> Any:
    """The settings model inside `X | None`, `dict[str, X]` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation
    for inner in typing.get_args(annotation):
        found = _model_in(inner)
        if isinstance(found, type) and issubclass(found, BaseModel):
            return found
    return annotation
