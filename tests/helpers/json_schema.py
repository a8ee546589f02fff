"""As much of JSON schema (draft 7) as panorgan's schemas use; a keyword that is not known here is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
_WORDS = {"$schema", "$defs", "title", "description", "default", "format", "examples"}


def problems(schema: Any, value: Any, whole: dict[str, Any] | None = None, place: str = "") -> Iterator[str]:
    """What is wrong with a value, one line each."""
    whole = schema if whole is None else whole
    if isinstance(schema, bool):
        if not schema:
            yield f"{place} is not known"
        return
    for keyword, wanted in schema.items():
        if keyword not in _WORDS:
            yield from _CHECKS[keyword](wanted, value, schema, whole, place)


def _type(wanted, value, schema, whole, place):
    fits = isinstance(value, _TYPES[wanted]) and (wanted == "boolean" or not isinstance(value, bool))
    if not fits:
        yield f"{place} is not of type {wanted}"


def _properties(wanted, value, schema, whole, place):
    for key in wanted.keys() & value.keys() if isinstance(value, dict) else ():
        yield from problems(wanted[key], value[key], whole, f"{place}.{key}")


def _additional_properties(wanted, value, schema, whole, place):
    for key in value.keys() - schema.get("properties", {}).keys() if isinstance(value, dict) else ():
        yield from problems(wanted, value[key], whole, f"{place}.{key}")


def _items(wanted, value, schema, whole, place):
    if isinstance(value, list):
        each = wanted if isinstance(wanted, list) else [wanted] * len(value)
        for number, (one, own) in enumerate(zip(each, value, strict=False)):
            yield from problems(one, own, whole, f"{place}[{number}]")


def _alternatives(exactly_one):
    def check(wanted, value, schema, whole, place):
        fitting = sum(not list(problems(one, value, whole, place)) for one in wanted)
        if not fitting or (exactly_one and fitting > 1):
            yield f"{place} fits {fitting} of {len(wanted)} alternatives"

    return check


def _reference(wanted, value, schema, whole, place):
    yield from problems(whole["$defs"][wanted.rpartition("/")[2]], value, whole, place)


def _test(kind, holds):
    def check(wanted, value, schema, whole, place):
        if isinstance(value, kind) and not isinstance(value, bool) and not holds(wanted, value):
            yield f"{place}: {value!r} does not satisfy {wanted!r}"

    return check


_NUMBER = (int, float)
_CHECKS: dict[str, Any] = {
    "type": _type,
    "properties": _properties,
    "additionalProperties": _additional_properties,
    "items": _items,
    "additionalItems": lambda *_: (),
    "anyOf": _alternatives(False),
    "oneOf": _alternatives(True),
    "$ref": _reference,
    "enum": _test(object, lambda wanted, value: value in wanted),
    "const": _test(object, lambda wanted, value: value == wanted),
    "required": _test(dict, lambda wanted, value: set(wanted) <= value.keys()),
    "minItems": _test(list, lambda wanted, value: len(value) >= wanted),
    "maxItems": _test(list, lambda wanted, value: len(value) <= wanted),
    "minProperties": _test(dict, lambda wanted, value: len(value) >= wanted),
    "minimum": _test(_NUMBER, lambda wanted, value: value >= wanted),
    "maximum": _test(_NUMBER, lambda wanted, value: value <= wanted),
    "exclusiveMinimum": _test(_NUMBER, lambda wanted, value: value > wanted),
    "exclusiveMaximum": _test(_NUMBER, lambda wanted, value: value < wanted),
    "minLength": _test(str, lambda wanted, value: len(value) >= wanted),
    "maxLength": _test(str, lambda wanted, value: len(value) <= wanted),
    "pattern": _test(str, lambda wanted, value: re.search(wanted, value)),
    "propertyNames": lambda *_: (),
}
