"""Organs that the catalogue lacks: described in an experiment or federation file, carried by agreement and model.

Names are looked up all over the program, so an own organ is known to the whole process once its experiment or model has
been read. Two meanings of one name in one process are refused: they would be mixed up silently.
"""

from __future__ import annotations

import colorsys
import difflib
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from panorgan.anatomy.catalogue import (
    Organ,
    Relation,
    Side,
    add_organs,
    added,
    built_in,
    check_parent,
    children,
    names_to_organs,
    normalise,
)
from panorgan.errors import AnatomyError
from panorgan.settings import SettingError, Settings

_NAME = r"[a-z][a-z0-9]*(_[a-z0-9]+)*"
_LONGEST_NAME = 60
_COLOUR = r"#[0-9a-fA-F]{6}"
# What the outputs and the tables of a run call something else.
_RESERVED = ("background", "mean", "all", "unknown", "global", "ignore")
# SNOMED CT qualifiers that complete the code of a sided organ.
_SIDES: Mapping[Side, tuple[str, str]] = {"left": ("7771000", "Left"), "right": ("24028007", "Right")}
_WHERE = "organs"


class SnomedCode(Settings):
    """A SNOMED CT code; without a meaning the organ's title is shown for it."""

    value: str
    meaning: str = ""

    @field_validator("value", mode="before")
    @classmethod
    def _digits(cls, value: Any) -> Any:
        text = str(value)
        if isinstance(value, bool) or not re.fullmatch(r"[0-9]{6,18}", text):
            raise SettingError("a SNOMED CT code is a number of 6 to 18 digits, such as 41216001", code="bad-snomed")
        return text


class OwnOrgan(Settings):
    """One organ under `organs`; every field may be left out."""

    title: str = Field("", max_length=80, description="how a reader sees it; made from the name if left out")
    parent: str | None = Field(None, description="the organ that it belongs to: of the catalogue, or another own one")
    relation: Relation | None = Field(
        None,
        description="inside: it lies within its parent, whose masks contain it (the default); part: the parent is "
        "exactly the union of its parts",
    )
    kind: Literal["organ", "vessel", "cavity", "tumour", "cyst"] = "organ"
    side: Side | None = Field(None, description="left or right: such organs are never mirrored")
    snomed: SnomedCode | None = Field(None, description="SNOMED CT code, or {value: …, meaning: …}")
    colour: str | None = Field(None, description='"#rrggbb"; chosen from the name if left out')
    aliases: tuple[str, ...] = Field((), description="other names that data folders use for it")
    one_piece: bool = Field(
        False, description="what a scan shows of it hangs together: `postprocess: pieces` cleans it"
    )

    @field_validator("snomed", mode="before")
    @classmethod
    def _bare_code(cls, code: Any) -> Any:
        return {"value": code} if isinstance(code, int | str) else code

    @field_validator("colour")
    @classmethod
    def _rgb(cls, colour: str | None) -> str | None:
        if colour is not None and not re.fullmatch(_COLOUR, colour):
            raise SettingError('a colour is written "#rrggbb", such as "#d55e00", in quotes', code="bad-colour")
        return colour and colour.lower()

    @field_validator("title", "aliases")
    @classmethod
    def _printable(cls, given: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for text in (given,) if isinstance(given, str) else given:
            if not text.isprintable() or (not isinstance(given, str) and not normalise(text)):
                raise SettingError("titles and aliases hold plain text", code="bad-organ-text")
        return given

    @model_validator(mode="after")
    def _related(self) -> OwnOrgan:
        if self.relation is not None and self.parent is None:
            raise SettingError("a relation needs a parent", code="relation-without-parent")
        if self.relation == "part" and self.kind != "organ":
            raise SettingError("what is a part of a union has the union's kind: leave out kind", code="part-with-kind")
        return self

    def organ(self, name: str, others: Mapping[str, OwnOrgan]) -> Organ:
        """The organ as the rest of the program sees it."""
        parent = None if self.parent is None else _parent(name, self.parent, others)
        relation: Relation | None = None if parent is None else self.relation or "inside"
        title = self.title or name.replace("_", " ").capitalize()
        modifier = _SIDES[self.side] if self.side and self.snomed else ("", "")
        return Organ(
            name=name,
            title=title,
            region=built_in()[parent].region if parent is not None and parent in built_in() else "other",
            kind="part" if relation == "part" else self.kind,
            parent=parent,
            relation=relation,
            side=self.side,
            snomed_value=self.snomed.value if self.snomed else "",
            snomed_meaning=(self.snomed.meaning or title) if self.snomed else "",
            colour=self.colour or colour_of(name),
            aliases=self.aliases,
            modifier_value=modifier[0],
            modifier_meaning=modifier[1],
            one_piece=self.one_piece,
        )


def declare_organs(organs: Mapping[str, OwnOrgan], *, finished: bool = False) -> None:
    """Make own organs known to this process; all of them, or none where one cannot be used.

    `finished` is for a model or a run that exists already: where a later catalogue has one of its names, it stays
    usable. A new experiment is asked to use the catalogue's organ.
    """
    for name in organs:
        _check_name(name)
    if not finished:
        for name, own in organs.items():
            _refuse_known(name, own)
    made = {name: own.organ(name, organs) for name, own in organs.items() if name not in built_in()}
    for name, organ in made.items():
        check_parent(organ, {**built_in(), **made}, f"{_WHERE}.{name}")
        if not finished:
            _refuse_further_part(organ)
    names_to_organs(made, _WHERE)
    for organ in made.values():
        _refuse_another_meaning(organ)
    names_to_organs({**added(), **made}, _WHERE)
    add_organs(made)


def colour_of(name: str) -> str:
    """A colour that depends on the name alone."""
    number = zlib.crc32(name.encode())
    hue, saturation, value = number % 360 / 360, 0.55 + number // 360 % 4 / 10, 0.65 + number // 1440 % 4 / 10
    red, green, blue = (round(255 * share) for share in colorsys.hsv_to_rgb(hue, saturation, value))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _check_name(name: str) -> None:
    if re.fullmatch(_NAME, name) and 2 <= len(name) <= _LONGEST_NAME and name not in _RESERVED:
        return
    proposed = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    usable = bool(re.fullmatch(_NAME, proposed)) and proposed not in _RESERVED
    raise AnatomyError(
        f"{name!r:.80} cannot be the name of an organ.",
        code="bad-organ-name",
        where=_WHERE,
        why="it has another use in tables and outputs"
        if name in _RESERVED
        else f"names hold 2 to {_LONGEST_NAME} lower-case letters and digits, begin with a letter, "
        "and separate words by '_'",
        fix=(f"Write {proposed!r}" if usable and proposed != name else "Choose another name")
        + "; 'title' and 'aliases' may be any text.",
    )


def _refuse_known(name: str, own: OwnOrgan) -> None:
    """The catalogue's organs keep their meaning: its names and aliases are taken."""
    taken = names_to_organs(built_in(), _WHERE)
    for text in (name, *own.aliases):
        known = taken.get(normalise(text))
        if known is not None:
            raise AnatomyError(
                f"The catalogue knows {text!r} already, as {known!r}.",
                code="organ-known",
                where=f"{_WHERE}.{name}",
                fix=f"Leave {name!r} out and use {known!r}; if yours is another structure, give it another name."
                if text == name
                else f"Remove the alias {text!r}; a site may still say 'labels: {{{text}: {name}}}'.",
            )


def _parent(name: str, text: str, others: Mapping[str, OwnOrgan]) -> str:
    """The parent's name: another own organ, or one of the catalogue by any of its names."""
    known = {**names_to_organs(built_in(), _WHERE), **{normalise(other): other for other in others}}
    found = known.get(normalise(text))
    if found is None:
        near = difflib.get_close_matches(normalise(text), known, n=1, cutoff=0.7)
        hint = f"Did you mean {known[near[0]]!r}? " if near else ""
        raise AnatomyError(
            f"The parent {text!r} of {name!r} does not exist.",
            code="parent-unknown",
            where=f"{_WHERE}.{name}.parent",
            fix=f"{hint}Name an organ of the catalogue (`panorgan organs` lists them), or describe {text!r} under "
            "'organs' too.",
        )
    return found


def _refuse_further_part(organ: Organ) -> None:
    """The catalogue's unions are complete: kidney is left and right, and nothing else."""
    if organ.relation != "part" or organ.parent is None or organ.parent not in built_in():
        return
    parts = [part for part in children(organ.parent, "part") if part in built_in()]
    if parts:
        raise AnatomyError(
            f"{organ.parent!r} has no further part {organ.name!r}.",
            code="union-complete",
            where=f"{_WHERE}.{organ.name}",
            why=f"it is exactly the union of {', '.join(parts)}",
            fix="Write 'relation: inside' for something that lies within it.",
        )


def _refuse_another_meaning(organ: Organ) -> None:
    """Titles, colours and codes may change from one experiment to the next; what belongs to what may not."""
    known = added().get(organ.name)
    if known is None or replace(
        known,
        title=organ.title,
        colour=organ.colour,
        aliases=organ.aliases,
        snomed_value=organ.snomed_value,
        snomed_meaning=organ.snomed_meaning,
        modifier_value=organ.modifier_value,
        modifier_meaning=organ.modifier_meaning,
    ) == replace(organ, region=known.region):
        return
    raise AnatomyError(
        f"{organ.name!r} has two meanings in this process.",
        code="organ-redefined",
        where=f"{_WHERE}.{organ.name}",
        why="another experiment or model that was read before gives it another parent, relation, kind or side",
        fix="Give one of them another name, or read them in processes of their own.",
    )


def refuse_undeclared(vocabulary: tuple[str, ...], organs: Mapping[str, OwnOrgan]) -> None:
    """Refuse an organ that only another experiment of this process describes: elsewhere it would be unknown."""
    for name in vocabulary:
        if name not in built_in() and name not in organs:
            raise AnatomyError(
                f"Unknown organ {name!r}.",
                code="unknown-organ",
                where="vocabulary",
                why="another experiment describes it, this one does not",
                fix=f"Describe it in this file: 'organs: {{{name}: {{}}}}'.",
            )


def declare_finished(content: Mapping[str, Any] | None) -> None:
    """Make the organs of a model's card or a run's manifest known; None where it has none."""
    declare_organs({str(name): OwnOrgan(**own) for name, own in (content or {}).items()}, finished=True)
