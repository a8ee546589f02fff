"""The organs panorgan knows: names, SNOMED CT codes, sides, parents, colours and aliases.

The facts live in ``organs.toml``; this file checks them once and finds an organ by any of its names.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Literal

from pydantic import Field, ValidationError

from panorgan.errors import AnatomyError
from panorgan.settings import Settings

Region = Literal["abdomen", "pelvis", "thorax", "trunk", "heart", "brain"]
Kind = Literal["organ", "part", "vessel", "cavity", "tumour", "cyst"]
Relation = Literal["part", "inside"]
Side = Literal["left", "right"]

_FILE = "organs.toml"
_LIST_ORGANS = "`panorgan organs` lists every name."


@dataclass(frozen=True)
class Organ:
    """One named structure, as described in ``organs.toml``.

    `relation` says how it belongs to `parent`: "part" (the parent is the union of its parts) or "inside".
    `modifier_value` and `modifier_meaning` complete the SNOMED CT code (Left, Right, ...); empty when unused.
    """

    name: str
    title: str
    region: Region
    kind: Kind
    parent: str | None
    relation: Relation | None
    side: Side | None
    snomed_value: str
    snomed_meaning: str
    colour: str
    aliases: tuple[str, ...]
    modifier_value: str = ""
    modifier_meaning: str = ""


class _Code(Settings):
    """A SNOMED CT code with the meaning DICOM shows for it."""

    value: str = Field(pattern=r"^[0-9]+$")
    meaning: str = Field(min_length=1)


class _Entry(Settings):
    """One table of the file."""

    title: str
    region: Region
    kind: Kind
    parent: str | None = None
    relation: Relation | None = None
    side: Side | None = None
    snomed: _Code
    modifier: _Code | None = None
    colour: str = Field(pattern=r"^#[0-9a-f]{6}$")
    aliases: tuple[str, ...] = ()

    def organ(self, name: str) -> Organ:
        """The entry as the rest of the program sees it."""
        return Organ(
            name=name,
            title=self.title,
            region=self.region,
            kind=self.kind,
            parent=self.parent,
            relation=self.relation,
            side=self.side,
            snomed_value=self.snomed.value,
            snomed_meaning=self.snomed.meaning,
            colour=self.colour,
            aliases=self.aliases,
            modifier_value=self.modifier.value if self.modifier else "",
            modifier_meaning=self.modifier.meaning if self.modifier else "",
        )


@cache
def catalogue() -> Mapping[str, Organ]:
    """Every organ by its name, in the order of the file (read-only)."""
    text = files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    return MappingProxyType(parse_catalogue(text))


def parse_catalogue(text: str) -> dict[str, Organ]:
    """Organs from TOML text. Refuses bad fields, bad parents and names that two organs share."""
    organs: dict[str, Organ] = {}
    try:
        for name, table in tomllib.loads(text).items():
            organs[name] = _Entry.model_validate(table).organ(name)
    except tomllib.TOMLDecodeError as error:
        raise AnatomyError(
            "The organ catalogue is not valid TOML.",
            code="catalogue-not-toml",
            where=_FILE,
            why=str(error),
            fix="Correct the TOML syntax.",
        ) from error
    except ValidationError as error:
        raise AnatomyError(
            f"The catalogue entry {name!r} is not usable.",
            code="bad-catalogue-entry",
            where=_FILE,
            why=str(error),
            fix="Correct the fields; the top of the file explains each.",
        ) from error
    for organ in organs.values():
        _check_parent(organ, organs)
    _names_to_organs(organs)
    return organs


@lru_cache(maxsize=4096)
def find_organ(text: str) -> Organ:
    """The organ with this name or alias. Case, spaces, hyphens and underscores do not matter."""
    name = _lookup().get(_normalise(text))
    if name is None:
        suggestion = _suggest(text)
        raise AnatomyError(f"Unknown organ {text!r}.", code="unknown-organ", fix=f"{suggestion} {_LIST_ORGANS}".strip())
    return catalogue()[name]


@lru_cache(maxsize=4096)
def ancestors(name: str) -> tuple[str, ...]:
    """Parent, grandparent and so on, nearest first, through both relations."""
    found: list[str] = []
    parent = find_organ(name).parent
    while parent is not None:
        found.append(parent)
        parent = catalogue()[parent].parent
    return tuple(found)


def children(name: str, relation: Relation | None = None) -> tuple[str, ...]:
    """Direct children in catalogue order: all, or only those with this relation."""
    parent = find_organ(name).name
    return tuple(
        organ.name for organ in catalogue().values() if organ.parent == parent and relation in (None, organ.relation)
    )


def _normalise(text: str) -> str:
    return re.sub(r"[\s_-]+", "", text).casefold()


@cache
def _lookup() -> Mapping[str, str]:
    return _names_to_organs(catalogue())


def _names_to_organs(organs: Mapping[str, Organ]) -> dict[str, str]:
    """Normalised names and aliases to organ names. Refuses one that belongs to two organs."""
    owners: dict[str, str] = {}
    for organ in organs.values():
        for text in (organ.name, *organ.aliases):
            owner = owners.setdefault(_normalise(text), organ.name)
            if owner != organ.name:
                raise AnatomyError(
                    f"The name {text!r} belongs to two organs.",
                    code="organ-name-shared",
                    where=_FILE,
                    why=f"{owner!r} and {organ.name!r} both use it.",
                    fix="Keep it in one of them.",
                )
    return owners


def _check_parent(organ: Organ, organs: Mapping[str, Organ]) -> None:
    """A parent needs a relation, must exist and must not lead back here."""
    fix = "Correct `kind`, `parent` and `relation` of this entry."
    if (organ.parent is None) != (organ.relation is None):
        what = f"{organ.name!r} has a parent without a relation, or the reverse."
        raise AnatomyError(what, code="parent-without-relation", where=_FILE, fix=fix)
    if (organ.kind == "part") != (organ.relation == "part"):
        what = f"{organ.name!r} is a part by only one of `kind` and `relation`."
        raise AnatomyError(what, code="part-by-half", where=_FILE, fix=fix)
    seen = {organ.name}
    parent = organ.parent
    while parent is not None:
        if parent not in organs:
            what = f"The parent {parent!r} of {organ.name!r} does not exist."
            raise AnatomyError(what, code="parent-unknown", where=_FILE, fix=fix)
        if parent in seen:
            what = f"The parents of {organ.name!r} form a cycle."
            raise AnatomyError(what, code="parents-in-a-circle", where=_FILE, fix=fix)
        seen.add(parent)
        parent = organs[parent].parent


def _suggest(text: str) -> str:
    """A hint with organ names; for a similar alias, the organ's own name is shown."""
    near = difflib.get_close_matches(_normalise(text), _lookup(), n=12, cutoff=0.7)
    names = list(dict.fromkeys(_lookup()[key] for key in near))[:3]
    return f"Did you mean {' or '.join(repr(name) for name in names)}?" if names else ""
