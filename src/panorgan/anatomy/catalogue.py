"""The organs panorgan knows: names, SNOMED CT codes, sides, parents, colours and aliases.

The facts live in ``organs.toml``; this file checks them once and finds an organ by any of its names. An experiment or a
model may add organs of its own for as long as the process lives; `own_organs` checks those.
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

Region = Literal["abdomen", "pelvis", "thorax", "trunk", "heart", "brain", "head", "neck", "limb", "other"]
Kind = Literal["organ", "part", "vessel", "cavity", "tumour", "cyst"]
Relation = Literal["part", "inside"]
Side = Literal["left", "right"]

_FILE = "organs.toml"
_LIST_ORGANS = "`panorgan organs` lists every name; `organs:` in the experiment file adds one."
_own: dict[str, Organ] = {}


@dataclass(frozen=True)
class Organ:
    """One named structure, as described in ``organs.toml`` or by an experiment.

    `relation` says how it belongs to `parent`: "part" (the parent is the union of its parts) or "inside".
    `modifier_value` and `modifier_meaning` complete the SNOMED CT code (Left, Right, ...); empty when unused. A
    structure that DICOM lists no concept for has no code. `one_piece`: what a scan shows of it hangs together.
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
    one_piece: bool = False


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
    snomed: _Code | None = None
    modifier: _Code | None = None
    colour: str = Field(pattern=r"^#[0-9a-f]{6}$")
    aliases: tuple[str, ...] = ()
    in_pieces: bool = False

    def organ(self, name: str) -> Organ:
        """The entry as the rest of the program sees it. A scan's borders cut vessels into pieces."""
        return Organ(
            name=name,
            title=self.title,
            region=self.region,
            kind=self.kind,
            parent=self.parent,
            relation=self.relation,
            side=self.side,
            snomed_value=self.snomed.value if self.snomed else "",
            snomed_meaning=self.snomed.meaning if self.snomed else "",
            colour=self.colour,
            aliases=self.aliases,
            modifier_value=self.modifier.value if self.modifier else "",
            modifier_meaning=self.modifier.meaning if self.modifier else "",
            one_piece=self.kind in ("organ", "part", "cavity") and not self.in_pieces,
        )


@cache
def built_in() -> Mapping[str, Organ]:
    """Every organ of the file by its name, in the order of the file (read-only)."""
    text = files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    return MappingProxyType(parse_catalogue(text))


@cache
def catalogue() -> Mapping[str, Organ]:
    """Every organ by its name: those of the file, then those that experiments and models added (read-only)."""
    return MappingProxyType({**built_in(), **_own})


def added() -> Mapping[str, Organ]:
    """The organs that experiments and models of this process added."""
    return MappingProxyType(_own)


def add_organs(organs: Mapping[str, Organ]) -> None:
    """Add organs that `own_organs` has checked, or replace some that were added before."""
    if any(_own.get(name) != organ for name, organ in organs.items()):
        _own.update(organs)
        _forget_lookups()


def remove_added() -> None:
    """Back to the organs of the file."""
    _own.clear()
    _forget_lookups()


def _forget_lookups() -> None:
    for cached in (catalogue, _lookup, find_organ, ancestors):
        cached.cache_clear()


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
        check_parent(organ, organs, _FILE)
    names_to_organs(organs, _FILE)
    return organs


@lru_cache(maxsize=4096)
def find_organ(text: str) -> Organ:
    """The organ with this name or alias. Case, spaces, hyphens and underscores do not matter."""
    name = _lookup().get(normalise(text))
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


def normalise(text: str) -> str:
    """What two spellings of one name have in common."""
    return re.sub(r"[\s_-]+", "", text).casefold()


@cache
def _lookup() -> Mapping[str, str]:
    # The name of an added organ comes first: a model must find its own organs, whatever a later catalogue calls so.
    own_names = {normalise(name): name for name in _own}
    return {**names_to_organs(_own, "organs"), **names_to_organs(built_in(), _FILE), **own_names}


def names_to_organs(organs: Mapping[str, Organ], where: str) -> dict[str, str]:
    """Normalised names and aliases to organ names. Refuses one that belongs to two organs."""
    owners: dict[str, str] = {}
    for organ in organs.values():
        for text in (organ.name, *organ.aliases):
            owner = owners.setdefault(normalise(text), organ.name)
            if owner != organ.name:
                raise AnatomyError(
                    f"The name {text!r} belongs to two organs.",
                    code="organ-name-shared",
                    where=where,
                    why=f"{owner!r} and {organ.name!r} both use it.",
                    fix="Keep it in one of them.",
                )
    return owners


def check_parent(organ: Organ, organs: Mapping[str, Organ], where: str) -> None:
    """A parent needs a relation, must exist and must not lead back here."""
    fix = "Correct `kind`, `parent` and `relation` of this entry."
    if (organ.parent is None) != (organ.relation is None):
        what = f"{organ.name!r} has a parent without a relation, or the reverse."
        raise AnatomyError(what, code="parent-without-relation", where=where, fix=fix)
    if (organ.kind == "part") != (organ.relation == "part"):
        what = f"{organ.name!r} is a part by only one of `kind` and `relation`."
        raise AnatomyError(what, code="part-by-half", where=where, fix=fix)
    seen = {organ.name}
    parent = organ.parent
    while parent is not None:
        if parent not in organs:
            what = f"The parent {parent!r} of {organ.name!r} does not exist."
            raise AnatomyError(what, code="parent-unknown", where=where, fix=fix)
        if parent in seen:
            what = f"The parents of {organ.name!r} form a cycle."
            raise AnatomyError(what, code="parents-in-a-circle", where=where, fix=fix)
        seen.add(parent)
        parent = organs[parent].parent


def _suggest(text: str) -> str:
    """A hint with organ names; for a similar alias, the organ's own name is shown."""
    near = difflib.get_close_matches(normalise(text), _lookup(), n=12, cutoff=0.7)
    names = list(dict.fromkeys(_lookup()[key] for key in near))[:3]
    return f"Did you mean {' or '.join(repr(name) for name in names)}?" if names else ""
