"""Reads a user's folder as cases: picks the layout, finds scans and labels, and names them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from panorgan.anatomy import Vocabulary
from panorgan.data.case import Case, LabelMap, MaskFiles, MaskSource
from panorgan.data.channels import choose_channels
from panorgan.data.dicom_seg import SegmentMasks
from panorgan.data.layouts.base import (
    FoundLabelMap,
    FoundLabels,
    FoundSegments,
    LabelRules,
    Layout,
    missing_folder,
)
from panorgan.data.layouts.nearest import no_layout
from panorgan.errors import ConfigError, DataError, did_you_mean

AUTO = "auto"


@cache
def layouts() -> Mapping[str, Layout]:
    """Every known layout by name; a file in this folder that declares a `LAYOUT` is found automatically."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    found = [module.LAYOUT for module in modules if hasattr(module, "LAYOUT")]
    return {layout.name: layout for layout in sorted(found, key=lambda layout: layout.name)}


def find_layout(folder: Path, name: str = AUTO) -> Layout:
    """The layout of that name, or with `auto` the one that fits the folder; says so when none or several fit."""
    if name != AUTO:
        if name not in layouts():
            raise ConfigError(
                f"There is no layout called {name!r}.",
                code="unknown-layout",
                where=str(folder),
                why=did_you_mean(name, layouts()),
                fix=f"Choose one of: {AUTO}, {', '.join(layouts())}.",
            )
        return layouts()[name]
    if not folder.exists():
        raise missing_folder(folder)
    fitting = [layout for layout in layouts().values() if layout.fits(folder)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise DataError(
            f"A data folder fits several layouts: {', '.join(layout.name for layout in fitting)}.",
            where=str(folder),
            fix="Say which, with 'layout: <name>' under the site or with '--layout <name>' on the command line.",
            code="several-layouts",
        )
    raise no_layout(folder, layouts())


def read_cases(
    folder: Path,
    site: str,
    vocabulary: Vocabulary,
    labels_from: Path | None = None,
    restrict: tuple[str, ...] | None = None,
    layout: str = AUTO,
    rename: Mapping[str, str] | None = None,
    ignore: tuple[str, ...] = (),
    channels: tuple[str, ...] = (),
    channel_names: Mapping[str, str] | None = None,
    leave_out: tuple[str, ...] = (),
) -> list[Case]:
    """All cases of one folder, sorted by name.

    Parameters
    ----------
    labels_from : another folder whose labels are used instead (withheld labels for scoring).
    restrict : keep only these structures of what the folder annotates.
    rename, ignore : see `LabelRules`.
    channels : the channels that every scan must have; the folder's first one if empty.
    channel_names : what the folder's names of channels mean.
    leave_out : cases and patients that need not have every channel, as they will not be used.
    """
    label_folder = labels_from or folder
    for place in (folder, label_folder):
        if not place.exists():
            raise missing_folder(place, site)
    own_layout = find_layout(folder, layout)
    label_layout = find_layout(label_folder) if labels_from else own_layout
    _refuse_problems(own_layout, folder)
    if labels_from:
        _refuse_problems(label_layout, label_folder)
    images, labels = own_layout.images(folder), label_layout.labels(label_folder)
    if not images:
        raise DataError(
            "A data folder holds no scans.",
            where=str(folder),
            why=f"it is laid out as {own_layout.title}, but no scan is named as that asks",
            fix="Check the names of the scans (nnU-Net: imagesTr/<case>_0000.nii.gz)."
            if own_layout.name == "nnunet"
            else "Check the names of the scans, or list them in a cases.csv.",
            code="no-scans",
        )
    rules = LabelRules(vocabulary, rename or {}, ignore, restrict)
    used = {n: image.channels for n, image in images.items() if not {n, image.patient} & set(leave_out)}
    chosen = choose_channels(channels, used, folder, channel_names or {}) if channels else {}
    cases = []
    for name, image in sorted(images.items()):
        if labels_from and name not in labels:
            raise DataError(
                "A case has no label file.",
                where=str(label_folder),
                why=f"nothing there belongs to case {name}",
                fix="Add its label, or move its scan out of the folder.",
                code="label-missing",
            )
        source = _mask_source(labels[name], rules, label_folder) if name in labels else None
        annotated = tuple(sorted(source.structures)) if source else ()
        own = chosen.get(name, ())
        path, slices = (own[0].path, own[0].slices) if own else (image.path, image.slices)
        cases.append(Case(name, image.patient, site, path, annotated, source, slices, own))
    return cases


def find_problems(layout: Layout, folder: Path) -> tuple[DataError, ...]:
    """Errors of single cases; `layout.images` and `layout.labels` leave those cases out."""
    return layout.problems(folder) if layout.problems else ()


def _refuse_problems(layout: Layout, folder: Path) -> None:
    """Raise all problems at once, so that they can be fixed together."""
    problems = find_problems(layout, folder)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        first = problems[0]
        others = len(problems) - 1
        raise DataError(
            f"{first.what} And {others} more problem{'s' if others > 1 else ''} of single cases in this folder.",
            where="\n".join(
                dict.fromkeys(p.where if p.what == first.what else f"{p.where}: {p.what}" for p in problems)
            ),
            why=first.why,
            fix=f"{first.fix} `panorgan doctor` says what to do about each.",
            code=first.code,
        )


def _mask_source(found: FoundLabels, rules: LabelRules, folder: Path) -> MaskSource | None:
    """Labels in the vocabulary's words; None when nothing of it is annotated."""
    if isinstance(found, FoundLabelMap):
        structures = rules.structures(tuple(found.ids), str(folder))
        if structures and not found.path.is_file():
            raise DataError(
                "A case has no label file.",
                where=str(found.path),
                fix="Add the file, or move its scan out of the folder.",
                code="label-missing",
            )
        declared = frozenset(i for ids in found.ids.values() for i in ids)
        ids = {s: tuple(sorted({i for n in names for i in found.ids[n]})) for s, names in structures.items()}
        return LabelMap(found.path, ids, declared) if ids else None
    if isinstance(found, FoundSegments):
        return _segment_masks(found, rules, folder)
    # A file for every organ that a program knows: those that the catalogue lacks are left out.
    structures = rules.structures(tuple(n for n in found.files if found.listed or rules.knows(n)), str(folder))
    files = {s: tuple(found.files[n] for n in names) for s, names in structures.items()}
    return MaskFiles(files) if files else None


def _segment_masks(found: FoundSegments, rules: LabelRules, folder: Path) -> SegmentMasks | None:
    """Segments in the vocabulary's words. An organ in two files is not united: it may be two readers' opinions."""
    structures = rules.structures(tuple(found.segments), str(folder))
    files: dict[str, set[Path]] = {}
    for name in {name for names in structures.values() for name in names}:
        files.setdefault(rules.organ(name, str(folder)), set()).update(s.path for s in found.segments[name])
    for organ, paths in sorted(files.items()):
        if len(paths) > 1:
            raise DataError(
                f"Several DICOM segmentations of one series hold the {organ}.",
                where="\n".join(str(path) for path in sorted(paths)),
                why="they may be two readers' or two versions; nothing says which is right",
                fix="Keep the right one and move the others out of the folder.",
                code="several-segmentations",
            )
    segments = {s: tuple(x for n in names for x in found.segments[n]) for s, names in structures.items()}
    return SegmentMasks(segments) if segments else None


__all__ = ["AUTO", "find_layout", "find_problems", "layouts", "read_cases"]
