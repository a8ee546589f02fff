"""One source: its layout, its cases, and what is wrong before a single scan is opened."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from panorgan.data.channels import Channel
from panorgan.data.formats import ITK_ENDINGS
from panorgan.data.layouts import AUTO, find_layout, find_problems
from panorgan.data.layouts.base import FoundImage, FoundLabelMap, FoundLabels, missing_folder, visible
from panorgan.data.layouts.channel_names import channel_names
from panorgan.data.layouts.dicom import unread_volumes
from panorgan.data_doctor.channel_lists import channels_of
from panorgan.data_doctor.files import NIFTI_ENDINGS, code_of
from panorgan.data_doctor.findings import Source
from panorgan.data_doctor.labels import label_names
from panorgan.data_doctor.names import name_organs, report_nothing_annotated
from panorgan.data_doctor.opened_source import OpenedSource
from panorgan.data_doctor.read_case import CaseTask
from panorgan.errors import DataError, PanorganError

_OF_LAYOUT = {"kits": "CT", "lits": "CT", "acdc": "MR"}
_NNUNET = ("nnunet", "msd")
_MR_WORDS = ("mr", "t1", "t2", "flair", "adc", "dwi")
_TEST = "imagesTs"
_SCAN_ENDINGS = (*NIFTI_ENDINGS, *ITK_ENDINGS)
# What damaged tables and descriptions raise before they can be checked.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error)


def open_source(source: Source) -> OpenedSource:
    """Find layout, cases and names; what stops `read_cases` becomes a finding."""
    opened = OpenedSource(source)
    folder = source.folder
    found_there = _look_into(opened)
    if found_there is None:
        return opened
    images, labels = found_there
    _report_orphans(opened, images, labels)
    _report_unread_volumes(opened, labels)
    mine = {case: image for case, image in sorted(images.items()) if source.uses(case, image.patient)}
    if not mine:
        if images or not opened.findings:  # otherwise a finding says what is wrong with them
            _report_no_scans(opened, len(images))
        return opened
    if labels and not any(map(label_names, labels.values())) and source.vocabulary is None and not source.external:
        report_nothing_annotated(opened, "label files are there, but no label is declared")
    labels = {case: found for case, found in labels.items() if case in mine and label_names(found)}
    _report_unlabelled(opened, mine, labels)
    organs = name_organs(opened, labels)
    channels = channel_names(folder) if opened.layout in _NNUNET else ()
    chosen_channels = channels_of(opened, mine)
    _report_channels(opened, channels)
    for case, image in mine.items():
        found = labels.get(case)
        own = {name: organs[name] for name in label_names(found) if name in organs} if found else {}
        modality, declared_in = _modality(opened, channels, image)
        split = source.splits.get(case, "")
        several = chosen_channels.get(case, ())
        path, slices = (several[0].path, several[0].slices) if several else (image.path, image.slices)
        about = (source.site, folder, case, image.patient, path, found, own, modality, split, slices)
        chosen = source.layout if source.layout != AUTO else ""
        opened.tasks.append(CaseTask(*about, declared_in=declared_in, layout=chosen, channels=several))
    opened.tasks += _test_images(opened, channels)
    return opened


def _look_into(opened: OpenedSource) -> tuple[dict[str, FoundImage], dict[str, FoundLabels]] | None:
    """Scans and labels by case; None, and a finding, where the folder cannot be understood."""
    folder = opened.source.folder
    code = "no-layout" if folder.exists() else "folder-missing"
    try:
        if not folder.exists():
            raise missing_folder(folder)
        layout = find_layout(folder, opened.source.layout)
        opened.layout, code = layout.name, "folder-unreadable"
        images = layout.images(folder)
        for problem in find_problems(layout, folder):
            case = _case_of(problem, images)
            code = code_of(problem, "folder-unreadable")
            opened.add(code, problem.what, problem.why, problem.fix, problem.where or folder, case)
        code = "folder-unreadable"
        return images, layout.labels(folder)
    except PanorganError as error:
        code = code_of(error, code) if isinstance(error, DataError) else code
        opened.add(code, error.what, error.why, error.fix, error.where or folder)
    except _UNREADABLE as error:
        what, fix = (
            "A file that describes the folder cannot be read.",
            "Compare the folder with its layout's documentation.",
        )
        opened.add("folder-unreadable", what, f"{type(error).__name__}: {error}", fix, folder)
    return None


def _case_of(problem: DataError, images: Mapping[str, FoundImage]) -> str:
    """The case whose files a problem names; empty where that is none of those that can be read."""
    where = {Path(line) for line in problem.where.splitlines()}
    return next((case for case, image in images.items() if where & {image.path, *image.slices}), "")


def _report_no_scans(opened: OpenedSource, there: int) -> None:
    if there:
        what, why = f"No scan of the folder belongs to site {opened.source.site}.", f"the folder holds {there} scans"
        fix = "Check 'part' and 'leave_out' of the site."
    else:
        what, why = "A data folder holds no scans.", "no file is named as the layout asks"
        fix = {
            "nnunet": "Check the names of the scans: imagesTr/<case>_0000.nii.gz.",
            "msd": "List the cases under 'training' in dataset.json.",
            "csv": "Add a row per case to the table: case,image,label,annotated.",
        }.get(opened.layout, f"Compare the names of the files with the layout {opened.layout!r}.")
    opened.add("no-scans", what, why, fix, opened.source.folder)


def _report_orphans(opened: OpenedSource, images: Mapping[str, FoundImage], labels: Mapping[str, FoundLabels]) -> None:
    """Labels without an image."""
    orphans = {case: "" for case in labels if case not in images}
    if opened.layout in _NNUNET and images:
        known = {found.path.name for found in labels.values() if isinstance(found, FoundLabelMap)}
        for path in _scan_files(opened.source.folder / "labelsTr"):
            if path.name not in known:
                orphans[path.name.split(".")[0]] = str(path)
    for case, file in sorted(orphans.items()):
        fix = "Add its scan, or remove the label."
        opened.add("orphan-label", "A label belongs to no scan.", "it is never read", fix, file, case)


def _report_unread_volumes(opened: OpenedSource, labels: Mapping[str, FoundLabels]) -> None:
    """NIfTI and the like in a DICOM tree: often the labels, under names by which they are not found."""
    if opened.layout != "dicom":
        return
    folder = opened.source.folder
    if unread := unread_volumes(folder, labels):
        opened.add(
            "unread-volumes",
            f"{len(unread)} NIfTI, MetaImage or NRRD file{'s' * (len(unread) != 1)} in a DICOM tree "
            f"{'are' if len(unread) != 1 else 'is'} not read.",
            f"such as {unread[0].relative_to(folder)}; no series is found for them by their place",
            f"If they are labels: 'panorgan init {shlex.quote(str(folder))}' pairs them with the series. If they are "
            "scans: give their folder as a site of its own.",
            unread[0],
        )


def _report_unlabelled(
    opened: OpenedSource, images: Mapping[str, FoundImage], labels: Mapping[str, FoundLabels]
) -> None:
    """Images without a label; a table says so on purpose, and a folder without any label is a test set."""
    if not labels or opened.layout == "csv":
        return
    for case in images:
        if case not in labels:
            fix = "Add its label, or leave it: it is not trained on."
            opened.add("unlabelled", "A scan has no label.", "others in this folder have", fix, images[case].path, case)


def _modality(opened: OpenedSource, channels: tuple[str, ...], image: FoundImage) -> tuple[str, str]:
    """CT or MR, and where that is written; both empty where nothing says it."""
    source, layout = opened.source, opened.layout
    of_file = {"csv": "the modality column of the table", "dicom": "Modality in the DICOM headers"}
    for modality, where in (
        (image.modality, of_file.get(layout, "the scan's name")),
        (_spoken(channels), "channel_names in dataset.json" if layout == "nnunet" else "modality in dataset.json"),
        (_OF_LAYOUT.get(layout, ""), f"layout {layout} is for {_OF_LAYOUT.get(layout, '')}"),
        (_by_name(image.path, layout), "the scan's name"),
        (source.modality, "'intensity: window' of the experiment's plan"),
    ):
        if modality:
            return modality, where
    return "", ""


def _spoken(channels: tuple[str, ...]) -> str:
    """CT or MR from the first channel's name; empty for other words."""
    first = channels[0].lower() if channels else ""
    if first == "ct":
        return "CT"
    return "MR" if any(word in first for word in _MR_WORDS) else ""


def _report_channels(opened: OpenedSource, channels: tuple[str, ...]) -> None:
    """Channels that training would not see. A 4-D file is refused where it is read without them."""
    if len(channels) > 1 and not opened.source.channels and (opened.layout == "nnunet" or _is_bare(opened)):
        what = f"Only the first of {len(channels)} channels is used: {channels[0]}."
        fix = f"Write 'channels: [{', '.join(channels)}]' into the experiment file to train on all of them."
        why = f"not used: {', '.join(channels[1:])}"
        opened.add("channels-unused", what, why, fix, opened.source.folder / "dataset.json")


def _is_bare(opened: OpenedSource) -> bool:
    """A folder that is checked without an experiment."""
    return opened.source.vocabulary is None


def _by_name(image: Path, layout: str) -> str:
    """TotalSegmentator and BIDS say it in the file's name."""
    stem = image.name.split(".")[0].lower()
    if layout == "totalsegmentator":
        return "MR" if stem == "mri" else "CT"
    if layout == "bids":
        suffix = stem.rsplit("_", 1)[-1]
        return "CT" if suffix == "ct" else "MR" if suffix in ("t1w", "t2w", "flair", "bold", "cine") else ""
    return ""


def _test_images(opened: OpenedSource, channels: Sequence[str]) -> list[CaseTask]:
    """nnU-Net's and the decathlon's test images: nothing of them may be trained on."""
    if opened.layout not in _NNUNET:
        return []
    source, tasks, modality = opened.source, [], _spoken(tuple(channels))
    for path in _scan_files(source.folder / _TEST):
        stem = path.name.split(".")[0]
        other_channel = stem[-5:-4] == "_" and stem[-4:].isdigit() and not stem.endswith("_0000")
        if opened.layout == "nnunet" and other_channel:
            continue
        case = stem.removesuffix("_0000")
        index = 0 if opened.layout == "msd" and len(channels) > 1 and case == stem else None
        whole = (Channel(channels[0], path, index=index),) if index is not None else ()
        task = CaseTask(source.site, source.folder, case, case, path, modality=modality, split=_TEST, image_only=True)
        tasks.append(replace(task, channels=whole))
    return tasks


def _scan_files(folder: Path) -> list[Path]:
    """Files that may be scans; systems leave other things next to them."""
    return [path for path in visible(folder, "*.*") if path.name.lower().endswith(_SCAN_ENDINGS)]
