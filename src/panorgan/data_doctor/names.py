"""What a folder's label names mean: organs, unknown names, and names that do not fit the experiment."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from panorgan.anatomy import catalogue, find_organ
from panorgan.data.layouts.base import FoundLabelMap, FoundLabels, FoundMasks, LabelRules
from panorgan.data_doctor.labels import label_names
from panorgan.data_doctor.opened_source import OpenedSource
from panorgan.errors import AnatomyError, DataError

# So near that it is a slip of the pen: "livver", but not "superior_vena_cava" for the inferior one.
_SLIP = 0.87
_NAMED = 5


def name_organs(opened: OpenedSource, labels: Mapping[str, FoundLabels]) -> dict[str, str]:
    """The organ of every label name that is used; reports unknown names and labels that do not fit."""
    source = opened.source
    organs: dict[str, str] = {}
    unknown: dict[str, str] = {}
    for name in sorted({name for found in labels.values() for name in label_names(found)} - set(source.ignore)):
        try:
            organs[name] = find_organ(source.rename.get(name, name)).name
        except AnatomyError as error:
            unknown[name] = error.fix
    _report_unknown(opened, labels, unknown)
    _report_shared_ids(opened, labels, organs)
    if source.vocabulary is None:
        return organs
    return {name: organs[name] for name in _used(opened, labels, tuple(unknown)) if name in organs}


def _report_unknown(opened: OpenedSource, labels: Mapping[str, FoundLabels], unknown: Mapping[str, str]) -> None:
    """Names in a label map must all be known; files of their own may be there for other uses of the folder."""
    own_file = {name for found in labels.values() if _unasked(found) for name in label_names(found)}
    mixed = {name for found in labels.values() if not _unasked(found) for name in label_names(found)}
    needed = [name for name in unknown if name in mixed or name in opened.source.rename]
    folder = opened.source.folder
    if needed:
        hints = " ".join(dict.fromkeys(unknown[n] for n in needed if unknown[n].startswith("Did you mean")))
        fix = f"Under the site: 'labels: {{{needed[0]}: <organ>}}' or 'ignore: [{', '.join(needed)}]'. {hints}"
        what = f"Labels with names that panorgan does not know: {', '.join(needed)}."
        why = "they are neither organs of the catalogue nor aliases"
        opened.add("unknown-name", what, why, fix.strip(), folder)
    free = [name for name in unknown if name in own_file and name not in needed]
    slips = {name: near for name in free if (near := _near(name))}
    for name, near in slips.items():
        fix = f"If it is the {near}, say so under the site: 'labels: {{{name}: {near}}}'; else 'ignore: [{name}]'."
        what = f"The mask files {name!r} are not used: panorgan knows no such organ."
        opened.add("near-name", what, f"the name is nearly that of {near}", fix, folder)
    others = [name for name in free if name not in slips]
    if others:
        what = f"Mask files that are not used: {_some(others)}."
        fix = "Nothing has to be done; 'labels: {<name>: <organ>}' under the site would use one."
        opened.add("unused-masks", what, f"{len(others)} names are no organs that panorgan knows", fix, folder)


def _unasked(found: FoundLabels) -> bool:
    """Whether a program wrote a file for every structure it knows, and no person listed them."""
    return isinstance(found, FoundMasks) and not found.listed


def _near(name: str) -> str:
    """The organ that a name nearly is; empty when there is none. A number means one of many, such as a vertebra."""
    if any(letter.isdigit() for letter in name):
        return ""
    found = difflib.get_close_matches(_plain(name), _plain_names(), n=1, cutoff=_SLIP)
    return _plain_names()[found[0]] if found else ""


def _plain_names() -> Mapping[str, str]:
    return {_plain(text): organ.name for organ in catalogue().values() for text in (organ.name, *organ.aliases)}


def _plain(name: str) -> str:
    return name.casefold().replace("_", "").replace(" ", "").replace("-", "")


def _report_shared_ids(opened: OpenedSource, labels: Mapping[str, FoundLabels], organs: Mapping[str, str]) -> None:
    """Regions may share ids; two organs with exactly the same ones are one of them written twice."""
    reported: set[tuple[str, ...]] = set()
    for found in labels.values():
        names: dict[tuple[int, ...], list[str]] = {}
        for name, ids in (found.ids if isinstance(found, FoundLabelMap) else {}).items():
            if name in organs:
                names.setdefault(tuple(sorted(ids)), []).append(name)
        for ids, own in names.items():
            if len({organs[name] for name in own}) > 1 and tuple(own) not in reported:
                reported.add(tuple(own))
                what = f"{' and '.join(own)} are declared with the same id: {', '.join(map(str, ids))}."
                fix = f"Correct the ids, or leave one out under the site: 'ignore: [{own[-1]}]'."
                opened.add("same-id-twice", what, "their masks would be the same", fix, opened.source.folder)


def _used(opened: OpenedSource, labels: Mapping[str, FoundLabels], unknown: tuple[str, ...]) -> set[str]:
    """The folder's names that make up structures of the vocabulary."""
    source = opened.source
    if source.vocabulary is None:
        return set()
    rules = LabelRules(source.vocabulary, source.rename, (*source.ignore, *unknown), source.restrict)
    used: set[str] = set()
    misfits: dict[str, tuple[DataError, list[str]]] = {}
    for case, found in sorted(labels.items()):
        try:
            used.update(
                name for names in rules.structures(label_names(found), str(source.folder)).values() for name in names
            )
        except DataError as error:
            misfits.setdefault(error.what, (error, []))[1].append(case)
            used.update(label_names(found))
    for misfit, cases in misfits.values():
        which = "" if len(cases) == len(labels) else f" (cases: {_some(cases)})"
        opened.add("labels-unusable", misfit.what, f"{misfit.why}{which}", misfit.fix, source.folder)
    if not used and not source.external:
        report_nothing_annotated(opened, f"the vocabulary is {', '.join(source.vocabulary)}")
    return used


def report_nothing_annotated(opened: OpenedSource, why: str) -> None:
    """A site that cannot be trained on."""
    opened.add(
        "nothing-annotated",
        f"Site {opened.source.site} annotates nothing{' of the vocabulary' if opened.source.vocabulary else ''}.",
        why,
        "Correct 'vocabulary', name the labels with 'labels: {…}', or mark the site 'external: true'."
        if opened.source.vocabulary
        else 'Declare what the label files hold (nnU-Net: "labels" in dataset.json).',
        opened.source.folder,
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
