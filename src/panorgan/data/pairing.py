"""Which label belongs to which scan, in folders that follow no convention but have names that agree somewhere."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from panorgan.data.file_roles import (
    Candidate,
    Words,
    organ_at_end,
    organ_at_start,
    pieces,
    says_role_only,
    without_role,
    words_of,
)
from panorgan.data.layouts.base import FoundImage

# A folder with more scans than this is no patient.
_SCANS_OF_A_PATIENT = 4


@dataclass(frozen=True)
class PairedCase:
    """A scan and its label files by structure; the empty name stands for a label map of all structures."""

    name: str
    image: FoundImage
    labels: Mapping[str, Path]


@dataclass(frozen=True)
class Pairing:
    """Cases, and what is in none.

    `unlabelled` scans and `orphans` (labels) have no counterpart. `unclear` are cases where several files fit: the case
    and those files. `by_folder` says that patients were taken from the names of folders.
    """

    cases: tuple[PairedCase, ...]
    unlabelled: tuple[Path, ...] = ()
    orphans: tuple[Path, ...] = ()
    unclear: tuple[tuple[str, tuple[Path, ...]], ...] = ()
    by_folder: bool = False


def pair(scans: Sequence[Candidate], labels: Sequence[Candidate]) -> Pairing:
    """Find the scan of every label."""
    finder = _Finder(scans)
    own: dict[Candidate, list[tuple[Candidate, str]]] = {}
    orphans: list[Path] = []
    unclear: list[tuple[str, tuple[Path, ...]]] = []
    for label in labels:
        found, rest = finder.scans_of(label)
        if len(found) == 1:
            own.setdefault(found[0], []).append((label, _structure(rest)))
        elif found:
            unclear.append((_case_name(label), tuple(scan.path for scan in found)))
        else:
            orphans.append(label.path)
    names = _unique_names(list(own))
    patients, by_folder = _patients(list(own), names)
    cases = []
    for scan, files in own.items():
        named = _by_structure(files)
        if named is None:
            unclear.append((names[scan], tuple(label.path for label, _ in files)))
            continue
        series = scan.series
        image = FoundImage(scan.path, patients[scan], series.files if series else (), series.modality if series else "")
        cases.append(PairedCase(names[scan], image, named))
    doubtful = {path for _, paths in unclear for path in paths}
    unlabelled = tuple(scan.path for scan in scans if scan not in own and scan.path not in doubtful)
    return Pairing(tuple(sorted(cases, key=lambda c: c.name)), unlabelled, tuple(orphans), tuple(unclear), by_folder)


class _Finder:
    """Looks scans up by any run of the words that name their case."""

    def __init__(self, scans: Sequence[Candidate]) -> None:
        self.words = {scan: scan.case_words for scan in scans}
        self.exact: dict[Words, list[Candidate]] = {}
        self.around: dict[Words, list[Candidate]] = {}
        self.numbers: dict[Words, list[Candidate]] = {}
        self.folders: dict[Path, list[Candidate]] = {}
        for scan, words in self.words.items():
            self.exact.setdefault(_plain(words), []).append(scan)
            for piece in pieces(_plain(words)):
                self.around.setdefault(piece, []).append(scan)
            self.numbers.setdefault(_numbers(words), []).append(scan)
            self.folders.setdefault(scan.path.parent, []).append(scan)

    def scans_of(self, label: Candidate) -> tuple[list[Candidate], Words]:
        """The scans that a label may belong to, and what its name says beyond the case."""
        words = label.case_words
        for found, rest in (self._named_within(words), self._named_around(words)):
            if found:
                return found, rest
        by_number = self.numbers.get(_numbers(words), []) if _numbers(words) else []
        if len(by_number) == 1:
            return by_number, tuple(word for word in words if not word.isdigit())
        beside = self.folders.get(label.path.parent, [])
        if len(beside) == 1 and len(label.parts) > 1:
            return beside, tuple(word for word in words_of(label.parts[-1]) if word in words)
        # A single scan next to a single label needs no names.
        return (self.exact.get((), []), words) if len(self.words) == 1 else ([], ())

    def _named_within(self, words: Words) -> tuple[list[Candidate], Words]:
        """Scans whose whole name is in the label's; the longest name fits best."""
        plain = _plain(words)
        for length in range(len(words), 0, -1):
            for start in range(len(words) - length + 1):
                if found := self.exact.get(plain[start : start + length]):
                    return found, words[:start] + words[start + length :]
        return [], ()

    def _named_around(self, words: Words) -> tuple[list[Candidate], Words]:
        """Scans whose name holds the label's, and more: a date, a phase, nnU-Net's channel."""
        end, start = organ_at_end(words), organ_at_start(words)
        tries: list[tuple[Words, Words]] = [(words, ())]
        tries += [(words[:-end], words[-end:])] if end else []
        tries += [(words[start:], words[:start])] if start else []
        for core, rest in tries:
            found = self.around.get(_plain(core), [])
            first = [scan for scan in found if self.words[scan][-1:] == ("0000",)]
            if found:
                return (first if len(first) == 1 else found), rest
        return [], ()


def _plain(words: Words) -> Words:
    """Numbers without leading zeros: img1 and label0001 are one case."""
    return tuple(str(int(word)) if word.isdecimal() else word for word in words)


def _numbers(words: Words) -> Words:
    return tuple(word for word in _plain(words) if word.isdigit())


def _structure(rest: Words) -> str:
    """What a label is of, by what its name says beyond the case."""
    end = organ_at_end(rest)
    return "_".join(rest[-end:] if end else rest)


def _by_structure(files: Sequence[tuple[Candidate, str]]) -> dict[str, Path] | None:
    """Files by structure; None where it is not clear which of them to take."""
    if len(files) == 1:
        label, name = files[0]
        return {name if organ_at_end(words_of(name)) else "": label.path}
    named = {name: label.path for label, name in files}
    return None if len(named) < len(files) or "" in named else named


def _case_name(candidate: Candidate) -> str:
    """The folders and the name that say the case, as they are written."""
    parts = [part for part in candidate.parts if not says_role_only(words_of(part))]
    kept = [p for k, p in enumerate(parts) if not any(words_of(p) in pieces(words_of(q)) for q in parts[k + 1 :])]
    if kept and kept[-1] == candidate.parts[-1]:
        kept[-1] = without_role(kept[-1])
        kept[-1] = re.sub(r"[_-]0000$", "", kept[-1]) if "imagesTr" in candidate.parts else kept[-1]
    text = re.sub(r"[^\w.-]+", "-", "_".join(kept)).strip("-._")
    return text or (candidate.series.patient if candidate.series else "") or "case"


def _unique_names(scans: Sequence[Candidate]) -> dict[Candidate, str]:
    names = {scan: _case_name(scan) for scan in scans}
    shared = {name for name, count in Counter(names.values()).items() if count > 1}
    return {s: _whole_name(s) if name in shared else name for s, name in names.items()}


def _whole_name(scan: Candidate) -> str:
    return re.sub(r"[^\w.-]+", "-", "_".join(scan.parts)) or "case"


def _patients(scans: Sequence[Candidate], names: Mapping[Candidate, str]) -> tuple[dict[Candidate, str], bool]:
    """DICOM says it, or a folder of few scans; else every scan is a patient. And whether folders say it."""
    folders = {scan: next(_case_folders(scan), "") for scan in scans}
    counts = Counter(filter(None, folders.values()))
    # All scans in one folder, or many in each: a folder of a study, or of a batch.
    crowded = (len(counts) == 1 < len(scans)) or max(counts.values(), default=0) > _SCANS_OF_A_PATIENT

    def of(scan: Candidate) -> str:
        said = scan.series.patient if scan.series else ""
        return said or ("" if crowded else folders[scan]) or names[scan]

    return {scan: of(scan) for scan in scans}, bool(counts) and not crowded


def _case_folders(scan: Candidate) -> Iterator[str]:
    """Folders on the way to a scan that say more than scan or label."""
    folders: Iterable[str] = scan.parts if scan.series else scan.parts[:-1]
    return (part for part in folders if not says_role_only(words_of(part)))


def site_folders(pairing: Pairing, folder: Path) -> tuple[str, ...]:
    """Folders directly within this one that look like sites: several cases in each, and names of their own."""
    cases: dict[str, set[str]] = {}
    for case in pairing.cases:
        parts = case.image.path.relative_to(folder).parts
        if len(parts) < 2 or says_role_only(words_of(parts[0])):
            return ()
        cases.setdefault(parts[0], set()).add(case.name)
    kinds = {tuple(word for word in words_of(name) if not word.isdigit()) for name in cases}
    return tuple(sorted(cases)) if len(kinds) == len(cases) > 1 and min(map(len, cases.values())) > 1 else ()
