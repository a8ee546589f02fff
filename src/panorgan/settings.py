"""The base class of all settings: immutable, typed, refusing unknown names; validation errors become `ConfigError`s.

Each room declares its own section next to the code that uses it; `panorgan.config` composes them into an experiment.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from panorgan.errors import ConfigError, PanorganError, did_you_mean


class SettingError(ValueError):
    """Raised by validators with the reason and a code; `validated` turns it into a ConfigError."""

    def __init__(self, why: str, *, code: str = "bad-setting") -> None:  # a default: an error is pickled without it
        super().__init__(why)
        self.code = code


class Settings(BaseModel):
    """A frozen pydantic model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types, in declaration order."""
        return self.model_dump(mode="json")


Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], content: Mapping[str, Any], where: str) -> Model:
    """Validate settings; raises a `ConfigError` instead of pydantic's report."""
    try:
        return model(**content)
    except ValidationError as error:
        raise _refused(model, error, where) from error
    except TypeError as error:
        raise ConfigError(
            "Settings must be named.",
            code="setting-not-named",
            where=where,
            why=str(error),
            fix="Use words, not numbers, left of the colon.",
        ) from error
    except PanorganError as error:
        if where and not error.where.startswith(where):
            error.where = f"{where}: {error.where}" if error.where else where
        raise


def _refused(model: type[BaseModel], error: ValidationError, where: str) -> ConfigError:
    """The first error that pydantic reports."""
    first = error.errors()[0]
    keys = [str(part) for part in first["loc"]]
    place = ".".join(keys)
    spot = f"{where}: {place}" if where and place else where or place
    if first["type"] == "extra_forbidden":
        return unknown_setting(keys[-1], fields_at(model, keys[:-1]), spot)
    reason = first["msg"].removeprefix("Value error, ")  # for errors about several settings, the input is no help
    got = "" if isinstance(first["input"], Mapping) and reason != first["msg"] else f" (got {first['input']!r:.80})"
    cause = first.get("ctx", {}).get("error")
    missing = first["type"] == "missing"
    return ConfigError(
        "A setting cannot be used as written.",
        code=cause.code if isinstance(cause, SettingError) else "missing-setting" if missing else "bad-setting",
        where=spot,
        why=reason + got,
        fix=f"Correct {place!r}." if place else "Correct it as the reason says.",
    )


def unknown_setting(name: str, known: Sequence[str], where: str) -> ConfigError:
    """The error for a name that is not a setting."""
    return ConfigError(
        f"There is no setting called {name!r}.",
        code="unknown-setting",
        where=where,
        why=did_you_mean(name, known),
        fix=f"Known here: {', '.join(known)}." if known else "Remove it.",
    )


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
