"""The organs a federation segments, and how a site's annotations relate to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from panorgan.anatomy.catalogue import ancestors, catalogue, children, find_organ
from panorgan.errors import AnatomyError


@dataclass(frozen=True, init=False)
class Vocabulary:
    """An ordered, immutable set of organ names; the order is the order of the output channels.

    Any name or alias is accepted to build it; `in`, iteration and `index` use canonical names only.
    """

    organs: tuple[str, ...]

    def __init__(self, names: Iterable[str]) -> None:
        given = _as_list(names)
        organs = tuple(find_organ(name).name for name in given)
        if not organs:
            fix = "Name at least one organ; `panorgan organs` lists them."
            raise AnatomyError("The vocabulary is empty.", code="empty-vocabulary", fix=fix)
        _refuse_duplicates(given, organs)
        _refuse_union_with_part(organs)
        object.__setattr__(self, "organs", organs)

    def __len__(self) -> int:
        return len(self.organs)

    def __iter__(self) -> Iterator[str]:
        return iter(self.organs)

    def __contains__(self, name: object) -> bool:
        return name in self.organs

    def __getitem__(self, position: int) -> str:
        return self.organs[position]

    def index(self, name: str) -> int:
        """Position of the organ with this canonical name."""
        if name not in self.organs:
            fix = f"Use one of: {', '.join(self.organs)}."
            raise AnatomyError(f"{name!r} is not in the vocabulary.", code="not-in-vocabulary", fix=fix)
        return self.organs.index(name)

    def colour(self, name: str) -> str:
        """Colour of an organ of the vocabulary, as ``#rrggbb``."""
        return catalogue()[self.organs[self.index(name)]].colour

    def members(self, structure: str) -> tuple[str, ...]:
        """The organs that make up an annotated structure, with what lies inside it, in vocabulary order.

        With kidney_left, kidney_right and kidney_tumour in the vocabulary, ``kidney`` is all three.
        """
        name = find_organ(structure).name
        if not _covered(name, self.organs.__contains__):
            raise self._unusable(name)
        return tuple(organ for organ in self.organs if organ == name or name in ancestors(organ))

    def resolve(self, names: Iterable[str], *, ignore_unknown: bool = False) -> tuple[str, ...]:
        """Canonical structures for the names of a site's annotations, each valid for `members`, in the order given.

        Repeats are dropped, and the parts of a union in the vocabulary are merged into it when all are given.
        With `ignore_unknown`, names unrelated to the vocabulary are dropped, not refused;
        an incomplete union is refused nevertheless, because dropping it would hide a mistake.
        """
        given: list[str] = []
        for text in _as_list(names):
            try:
                given.append(find_organ(text).name)
            except AnatomyError:
                if not ignore_unknown:
                    raise
        structures = (self._resolve_one(name, given, ignore_unknown) for name in given)
        return tuple(dict.fromkeys(structure for structure in structures if structure is not None))

    def inside(self, name: str) -> tuple[str, ...]:
        """Organs of the vocabulary that lie inside `name` or inside one of its parts, in vocabulary order."""
        outer = find_organ(name).name
        return tuple(
            organ for organ in self.organs if outer in ancestors(organ) and _inside_links(organ) > _inside_links(outer)
        )

    def paint_order(self) -> tuple[str, ...]:
        """Outer before inner: painting organs in this order lets the inner one win."""
        return tuple(sorted(self.organs, key=_inside_links))

    def _resolve_one(self, name: str, given: list[str], ignore_unknown: bool) -> str | None:
        union = self._union_of(name)
        if union is not None and _covered(union, given.__contains__):
            return union
        if union is None and _covered(name, self.organs.__contains__):
            return name
        if ignore_unknown and union is None and not self._shares_part_with(name):
            return None
        raise self._unusable(name)

    def _union_of(self, name: str) -> str | None:
        """The union in the vocabulary that `name` is a part of."""
        return next((union for union in _unions(name) if union in self.organs), None)

    def _shares_part_with(self, name: str) -> bool:
        return any(name in _unions(organ) for organ in self.organs)

    def _missing_parts(self, name: str) -> tuple[str, ...]:
        """The largest parts of `name` that the vocabulary has nothing of."""
        if _covered(name, self.organs.__contains__):
            return ()
        if not self._shares_part_with(name):
            return (name,)
        return tuple(missing for part in children(name, "part") for missing in self._missing_parts(part))

    def _unusable(self, name: str) -> AnatomyError:
        """Why this structure cannot be expressed with the vocabulary, and what to do."""
        union = self._union_of(name)
        if union is not None:
            parts = ", ".join(children(union, "part"))
            return AnatomyError(
                f"{name!r} alone says nothing certain about {union!r}.",
                code="part-of-union",
                why=f"The vocabulary has {union!r}, and {name!r} is only a part of it.",
                fix=f"Annotate all its parts ({parts}): they are merged. "
                f"Or put the parts in the vocabulary instead of {union!r}.",
            )
        if self._shares_part_with(name):
            missing = ", ".join(self._missing_parts(name))
            return AnatomyError(
                f"The vocabulary covers only a part of {name!r}.",
                code="union-incomplete",
                why=f"Missing: {missing}.",
                fix=f"Add {missing} to the vocabulary, or leave {name!r} out of the annotated names.",
            )
        return AnatomyError(
            f"{name!r} is not in the vocabulary.",
            code="not-in-vocabulary",
            why=f"The vocabulary has: {', '.join(self.organs)}.",
            fix=f"Add {name!r} to the vocabulary, or leave it out of the annotated names.",
        )


def _as_list(names: Iterable[str]) -> list[str]:
    # A single string is iterable too, and would be read letter by letter.
    if isinstance(names, str):
        raise AnatomyError(
            f"Expected a list of organ names, not the text {names!r}.",
            code="names-not-a-list",
            fix=f"Write [{names!r}] instead.",
        )
    return list(names)


def _refuse_duplicates(given: list[str], organs: tuple[str, ...]) -> None:
    first: dict[str, str] = {}
    for text, organ in zip(given, organs, strict=True):
        if organ in first:
            raise AnatomyError(
                f"{organ!r} is in the vocabulary twice.",
                code="organ-twice",
                why=f"{first[organ]!r} and {text!r} name the same organ.",
                fix=f"Keep {organ!r} once.",
            )
        first[organ] = text


def _refuse_union_with_part(organs: tuple[str, ...]) -> None:
    for organ in organs:
        for union in _unions(organ):
            if union in organs:
                raise AnatomyError(
                    f"The vocabulary has both {union!r} and its part {organ!r}.",
                    code="union-with-part",
                    why="A voxel of the part would belong to two organs of the same rank.",
                    fix=f"Keep {union!r}, or replace it by its parts: {', '.join(children(union, 'part'))}.",
                )


def _unions(name: str) -> tuple[str, ...]:
    """What `name` is a part of, nearest first. An "inside" link ends the chain."""
    found: list[str] = []
    organ = catalogue()[name]
    while organ.parent is not None and organ.relation == "part":
        found.append(organ.parent)
        organ = catalogue()[organ.parent]
    return tuple(found)


def _covered(name: str, present: Callable[[str], bool]) -> bool:
    """Whether `name` is present, or is the union of parts that are all covered."""
    parts = children(name, "part")
    return present(name) or (bool(parts) and all(_covered(part, present) for part in parts))


def _inside_links(name: str) -> int:
    """How many structures enclose this one."""
    return sum(catalogue()[step].relation == "inside" for step in (name, *ancestors(name)))
