"""A first look at an ordinary folder: its cases, its labels with their volumes, and what each of them may be.

A folder that fits a layout is read as that. In any other, scans and labels are paired by their names, and
`workflows/draft` writes a table of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from panorgan.anatomy import find_organ
from panorgan.data.dicom import read_tree
from panorgan.data.file_roles import Candidate, chunks_of, file_candidate, series_candidate, sort_by_role
from panorgan.data.folder_contents import DICOM, FolderContents, list_contents, subfolders
from panorgan.data.layouts import find_layout, layouts
from panorgan.data.layouts.base import FoundImage, FoundLabelMap, FoundLabels, FoundMasks, Layout
from panorgan.data.layouts.dicom import unread_volumes
from panorgan.data.pairing import PairedCase, Pairing, pair, site_folders
from panorgan.data_doctor.guess_organs import Guess, guess_organs
from panorgan.data_doctor.labels import label_names
from panorgan.errors import AnatomyError, DataError
from panorgan.workflows.label_files import LabelFile, holds_labels, look_at_case, read_label_file
from panorgan.workflows.survey_errors import (
    folder_of_sites,
    no_labels,
    no_scans,
    not_a_folder,
    nothing_paired,
    several_files_fit,
    unusable_labels,
)

OnProgress = Callable[[str, int, int], None]
# So many cases are read with their scans: enough for the organs of most to agree.
_LOOKED_AT = 6
_WORKERS = 4
_SOME = 3


@dataclass(frozen=True)
class LabelFacts:
    """One label of a folder.

    `ids` are those of a label map, and empty for masks in files of their own. `cases` is how many of the `looked_at`
    hold it, `volume_ml` the median of those. `organ` is empty where nothing says it; `source` is name, guess or given.
    """

    name: str
    ids: tuple[int, ...]
    cases: int
    looked_at: int
    volume_ml: float
    organ: str = ""
    source: str = ""
    why: str = ""


@dataclass(frozen=True)
class SurveyedCase:
    """One scan and its labels."""

    name: str
    image: FoundImage
    labels: FoundLabels


@dataclass(frozen=True)
class SiteSurvey:
    """What one folder holds. `layout` is empty where a table of cases has to be written.

    `notes` are for the user; `troubles` are cases that were read and cannot be used as they are.
    """

    site: str
    folder: Path
    layout: str
    cases: tuple[SurveyedCase, ...]
    labels: tuple[LabelFacts, ...]
    modality: str
    notes: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()

    @property
    def patients(self) -> int:
        """How many patients the cases are of."""
        return len({case.image.patient for case in self.cases})

    @property
    def extent(self) -> str:
        """`12 scans of 10 patients`."""

        def count(number: int, what: str) -> str:
            return f"{number} {what}{'s' * (number != 1)}"

        return f"{count(len(self.cases), 'scan')} of {count(self.patients, 'patient')}"

    @property
    def organs(self) -> tuple[str, ...]:
        """The organs of the labels that are drawn somewhere."""
        return tuple(dict.fromkeys(label.organ for label in self.labels if label.organ and label.cases))


@dataclass(frozen=True)
class Choice:
    """What names leave open: a word in the name of the right scan or label file, and whether folders are no sites."""

    scan_file: str = ""
    label_file: str = ""
    one_site: bool = False


def survey(folder: Path, site: str, choice: Choice | None = None, progress: OnProgress | None = None) -> SiteSurvey:
    """Look at a folder: which layout, or which scans and labels belong together; labels, volumes and guesses."""
    show = progress or (lambda what, done, total: None)
    choice = choice or Choice()
    if not folder.is_dir():
        raise not_a_folder(folder)
    layout, place = _layout(folder)
    if layout is not None:
        return _of_layout(layout, place, site, show)
    show("looking for scans and labels", 0, 0)
    pairing = _paired(folder, list_contents(folder), choice)
    files = _label_files(pairing, show)
    cases, notes = _usable(pairing, files)
    if not cases:
        raise _unusable(pairing, files, folder)
    cases = _with_ids(cases, files)
    facts = _facts(cases, files)
    return _looked_at(SiteSurvey(site, folder, "", cases, facts, "", (*_notes(pairing, folder), *notes)), show)


def check_folder(folder: Path, choice: Choice) -> None:
    """Refuse a folder without scans and labels that belong together, before any of them is read."""
    if not folder.is_dir():
        raise not_a_folder(folder)
    if _layout(folder)[0] is None:
        _paired(folder, list_contents(folder), choice)


def _layout(folder: Path) -> tuple[Layout | None, Path]:
    """The layout that fits the folder, or the only folder within it; none where scans and labels must be paired."""
    inner = list(subfolders(folder))
    for place in (folder, *(inner if len(inner) == 1 else ())):
        fitting = [layout for layout in layouts().values() if layout.fits(place)]
        if len(fitting) > 1:
            find_layout(place)  # says which
        if fitting and not (fitting[0].name == "dicom" and _without_segmentations(place)):
            return fitting[0], place
    return None, folder


def _without_segmentations(folder: Path) -> bool:
    """Whether labels of a DICOM tree, if there are any, are files whose integers need names."""
    tree = read_tree(folder)
    named = (folder / "labels.json").is_file()
    return not (tree.segmentations or tree.contours or tree.problems or named)


def _of_layout(layout: Layout, folder: Path, site: str, show: OnProgress) -> SiteSurvey:
    images, labels = layout.images(folder), layout.labels(folder)
    cases = tuple(SurveyedCase(name, image, labels[name]) for name, image in sorted(images.items()) if labels.get(name))
    if not images:
        raise no_scans(folder, list_contents(folder), layout.name)
    if not cases:
        raise no_labels(folder, [image.path for image in images.values()], layout.name)
    left = len(images) - len(cases)
    notes = [f"{left} scans without a label are not used."] if left else []
    if layout.name == "dicom":
        notes += _unread(unread_volumes(folder, labels), folder)
    return _looked_at(SiteSurvey(site, folder, layout.name, cases, (), "", tuple(notes)), show)


def _unread(volumes: Sequence[Path], folder: Path) -> list[str]:
    """A note about volumes in a tree that is read as DICOM."""
    if not volumes:
        return []
    return [
        f"The folder is read as a DICOM tree, so {len(volumes)} NIfTI, MetaImage or NRRD "
        f"file{'s' * (len(volumes) != 1)} in it (such as {volumes[0].relative_to(folder)}) are not used: if they are "
        "scans with labels, give their folder as a site of its own."
    ]


def _paired(folder: Path, contents: FolderContents, choice: Choice) -> Pairing:
    """Scans and labels that belong together."""
    candidates = [file_candidate(path, folder) for path in contents.volumes]
    if DICOM in contents.files:
        series = read_tree(folder).series
        alone = Counter(one.folder for one in series)
        # A table names the folder of a series; which of several in it a label belongs to is not known either.
        candidates += [series_candidate(one, folder) for one in series if alone[one.folder] == 1]
    if not candidates:
        raise no_scans(folder, contents)
    scans, labels = sort_by_role(candidates, holds_labels)
    if not scans:
        raise no_scans(folder, contents, labels=[label.path for label in labels])
    if not labels:
        raise no_labels(folder, [scan.path for scan in scans])
    found = pair(_chosen(scans, choice.scan_file), _chosen(labels, choice.label_file))
    if not found.cases:
        if found.unclear:
            raise several_files_fit(folder, found.unclear)
        raise nothing_paired(folder, [scan.path for scan in scans], [label.path for label in labels])
    sites = site_folders(found, folder)
    if sites and not choice.one_site:
        raise folder_of_sites(folder, sites)
    return found


def _chosen(candidates: Sequence[Candidate], word: str) -> list[Candidate]:
    """Those with the word in their name."""
    return [one for one in candidates if one.chunks.issuperset(chunks_of(word))]


def _label_files(pairing: Pairing, show: OnProgress) -> dict[Path, LabelFile]:
    """Ids and volumes of every label file; several at a time, because most of it is unpacking."""
    paths = sorted({path for case in pairing.cases for path in case.labels.values()})
    found: dict[Path, LabelFile] = {}
    with ThreadPoolExecutor(_WORKERS) as pool:
        for done, file in enumerate(pool.map(read_label_file, paths), start=1):
            found[file.path] = file
            show("reading labels", done, len(paths))
    return found


def _usable(pairing: Pairing, files: Mapping[Path, LabelFile]) -> tuple[tuple[SurveyedCase, ...], tuple[str, ...]]:
    """Cases whose label files are label maps or masks, and notes about the others."""
    cases, notes = [], []
    for case in pairing.cases:
        own = [files[path] for path in case.labels.values()]
        trouble = next((f"{file.path.name}: {file.trouble}" for file in own if file.trouble), "")
        if not trouble and len(own) > 1 and any(len(file.volumes) > 1 for file in own):
            trouble = "it has several label maps; --label-file WORD says which to take"
        if not trouble and len(own) > 1 and any(";" in str(file.path) for file in own):
            trouble = "the path of a mask holds a semicolon, which separates masks in a table"
        if trouble:
            notes.append(f"Case {case.name} is left out: {trouble}")
        else:
            cases.append(SurveyedCase(case.name, case.image, _as_found(case, files)))
    more = [f"And {len(notes) - _SOME} more cases are left out."] if len(notes) > _SOME else []
    return tuple(cases), (*notes[:_SOME], *more)


def _unusable(pairing: Pairing, files: Mapping[Path, LabelFile], folder: Path) -> DataError:
    """Why no case is left: bad label files, or several label maps for each."""
    bad = [file for file in files.values() if file.trouble]
    if bad:
        return unusable_labels(bad)
    return several_files_fit(folder, [(case.name, tuple(case.labels.values())) for case in pairing.cases])


def _as_found(case: PairedCase, files: Mapping[Path, LabelFile]) -> FoundLabels:
    """A label map, or a mask per structure; a file that is named after one organ and holds several is a map."""
    if len(case.labels) == 1:
        ((name, path),) = case.labels.items()
        if not name or len(files[path].volumes) > 1:
            return FoundLabelMap(path, {})
    return FoundMasks(case.labels, listed=True)


def _with_ids(cases: Sequence[SurveyedCase], files: Mapping[Path, LabelFile]) -> tuple[SurveyedCase, ...]:
    """Label maps of one folder hold the same structures: an id that one case lacks is absent there."""
    maps = [case.labels.path for case in cases if isinstance(case.labels, FoundLabelMap)]
    ids = {f"label_{i}": (i,) for i in sorted({i for path in maps for i in files[path].volumes})}
    return tuple(
        replace(case, labels=FoundLabelMap(case.labels.path, ids)) if isinstance(case.labels, FoundLabelMap) else case
        for case in cases
    )


def _facts(cases: Sequence[SurveyedCase], files: Mapping[Path, LabelFile]) -> tuple[LabelFacts, ...]:
    """Volumes of all labels, from the label files alone."""
    volumes: dict[str, list[float]] = {}
    ids: dict[str, tuple[int, ...]] = {}
    holders: dict[str, int] = {}
    for case in cases:
        found = case.labels
        if isinstance(found, FoundLabelMap):
            own = {name: files[found.path].volumes.get(number[0], 0.0) for name, number in found.ids.items()}
            ids |= found.ids
        else:
            assert isinstance(found, FoundMasks)
            own = {name: sum(files[path].volumes.values()) for name, path in found.files.items()}
        for name, ml in own.items():
            volumes.setdefault(name, []).extend([ml] if ml else [])
            holders[name] = holders.get(name, 0) + 1
    return tuple(
        LabelFacts(name, ids.get(name, ()), len(own), holders[name], median(own) if own else 0.0)
        for name, own in sorted(volumes.items(), key=lambda entry: (ids.get(entry[0], ()), entry[0]))
    )


def _looked_at(found: SiteSurvey, show: OnProgress) -> SiteSurvey:
    """Read some cases with their scans: modality, volumes where they are not known yet, and guesses by anatomy."""
    step = max(1, len(found.cases) // _LOOKED_AT)
    some = found.cases[::step][:_LOOKED_AT]
    looks, volumes, troubles = [], [], []
    for done, case in enumerate(some, start=1):
        seen = look_at_case(case.image, case.labels)
        show("looking at scans", done, len(some))
        if isinstance(seen, str):
            troubles.append(f"Case {case.name}: {seen}")
        else:
            looks.append(seen[0])
            volumes.append(seen[1])
    labels = found.labels or _sampled(found.cases, volumes)
    guesses = guess_organs(looks)
    modalities = {look.modality for look in looks}
    named = [_by_name(label) for label in labels]
    taken = {label.organ for label in named}
    guesses = {name: guess for name, guess in guesses.items() if guess.organ not in taken}
    return replace(
        found,
        labels=tuple(label if label.organ else _guessed(label, guesses.get(label.name)) for label in named),
        modality=modalities.pop() if len(modalities) == 1 else "",
        troubles=tuple(troubles),
    )


def _sampled(cases: Sequence[SurveyedCase], volumes: Sequence[Mapping[str, float]]) -> tuple[LabelFacts, ...]:
    """The labels of a layout by their names, with the volumes of the cases that were read."""
    ids: dict[str, tuple[int, ...]] = {}
    for case in cases:
        found = (
            case.labels.ids if isinstance(case.labels, FoundLabelMap) else dict.fromkeys(label_names(case.labels), ())
        )
        ids |= {name: numbers for name, numbers in found.items() if name not in ids}
    facts = []
    for name, numbers in ids.items():
        own = [one[name] for one in volumes if name in one]
        drawn = [ml for ml in own if ml]
        facts.append(LabelFacts(name, numbers, len(drawn), len(own), median(drawn) if drawn else 0.0))
    return tuple(facts)


def _by_name(label: LabelFacts) -> LabelFacts:
    """With the organ that its name is."""
    try:
        return replace(label, organ=find_organ(label.name).name, source="name")
    except AnatomyError:
        return label


def _guessed(label: LabelFacts, guess: Guess | None) -> LabelFacts:
    """With the organ that anatomy makes of it, if any."""
    return replace(label, organ=guess.organ, source="guess", why=guess.why) if guess else label


def _notes(pairing: Pairing, folder: Path) -> tuple[str, ...]:
    """What is left out, and how patients were distinguished."""

    def some(paths: Sequence[Path]) -> str:
        return ", ".join(str(path.relative_to(folder)) for path in paths[:_SOME]) + (" …" if len(paths) > _SOME else "")

    notes = []
    if pairing.unlabelled:
        notes.append(f"Scans without a label, not used: {len(pairing.unlabelled)} ({some(pairing.unlabelled)}).")
    if pairing.orphans:
        notes.append(f"Labels without a scan, not used: {len(pairing.orphans)} ({some(pairing.orphans)}).")
    if pairing.unclear:
        name, paths = pairing.unclear[0]
        notes.append(
            f"Several files fit, not used: {len(pairing.unclear)} cases, such as {name} ({some(paths)}); "
            "--scan-file WORD or --label-file WORD says which to take."
        )
    if len(pairing.cases) > 1 and not pairing.by_folder and not any(case.image.slices for case in pairing.cases):
        notes.append(
            "Every scan is taken for a patient of its own: where a patient has several, correct the column 'patient'."
        )
    return tuple(notes)


def site_name(folder: Path) -> str:
    """A name for the site from its folder; from the one above where that says nothing."""
    place = folder.resolve()
    for name in (place.name, place.parent.name):
        text = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")
        if text and text.lower() not in ("data", "dataset", "images", "scans", "raw", "train", "training"):
            return text
    return "site"


def site_names(folders: Sequence[Path]) -> list[str]:
    """A name for every site, each its own: a repeated one gets a number."""
    names: list[str] = []
    for folder in folders:
        name, number = site_name(folder), 1
        while name in names:
            number += 1
            name = f"{site_name(folder)}-{number}"
        names.append(name)
    return names
