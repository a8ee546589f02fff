"""The role of a file by its name: scan or label, which case, which organ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from panorgan.anatomy import find_organ
from panorgan.data.dicom import Series
from panorgan.data.folder_contents import without_ending
from panorgan.errors import AnatomyError

Words = tuple[str, ...]

_LABEL_TEXT = """
seg segs segm segmentation segmentations dseg mask masks label labels labelstr labelsts labelmap labelmaps lbl lbls
gt gts ground truth groundtruth annotation annotations annot roi rois contour contours delineation delineations manual
organs
"""
_SCAN_TEXT = """
image images imagestr imagests img imgs imaging scan scans volume volumes vol vols ct cts cect ncct mr mri mrs orig
original raw input data dicom dicoms dcm nifti nii series
"""
_LABEL_WORDS, _SCAN_WORDS = frozenset(_LABEL_TEXT.split()), frozenset(_SCAN_TEXT.split())
# The longest names of organs have a few words: left lower lobe of the lung.
_LONGEST_ORGAN = 6


class Role(Enum):
    """What a file is by its name. `mask` is named after an organ, which a scan may be too."""

    scan, label, mask, unclear = range(4)


@dataclass(frozen=True)
class Candidate:
    """A file, or a DICOM series, that may be a scan or a label; `parts` are its folders and its name."""

    path: Path
    parts: tuple[str, ...]
    series: Series | None = None

    @property
    def case_words(self) -> Words:
        """What its folders and name say beyond scan and label: the case, and of a mask its organ."""
        parts = [tuple(w for w in words_of(part) if w not in _LABEL_WORDS | _SCAN_WORDS) for part in self.parts]
        # Folders that a later part repeats add nothing: pat1/pat1_ct.nii.gz.
        kept = [p for k, p in enumerate(parts) if not any(p in pieces(later) for later in parts[k + 1 :])]
        return tuple(word for part in kept for word in part)

    @property
    def chunks(self) -> frozenset[str]:
        """What separators leave of its folders and name, as a person names a file: t1, not t and 1."""
        return frozenset(chunk for part in self.parts for chunk in chunks_of(part))

    def like(self) -> tuple[Words, ...]:
        """Equal for files that differ in numbers alone."""
        return tuple(tuple(w for w in words_of(part) if not w.isdigit()) for part in self.parts[-2:])


def file_candidate(path: Path, folder: Path) -> Candidate:
    """A volume file below a folder."""
    return Candidate(path, (*path.relative_to(folder).parts[:-1], without_ending(path)))


def series_candidate(series: Series, folder: Path) -> Candidate:
    """A DICOM series below a folder."""
    return Candidate(series.folder, series.folder.relative_to(folder).parts, series)


def words_of(text: str) -> Words:
    """Words and numbers of a name, in lower case."""
    return tuple(re.findall(r"[^\W\d_]+|\d+", text.lower()))


def chunks_of(text: str) -> list[str]:
    """What separators leave of a name, in lower case."""
    return re.findall(r"[^\W_]+", text.lower())


def pieces(words: Words) -> frozenset[Words]:
    """Every run of words within these."""
    return frozenset(words[a:b] for a in range(len(words)) for b in range(a + 1, len(words) + 1))


def organ_at_end(words: Words) -> int:
    """How many of the last words name an organ; 0 for none."""
    for count in range(min(_LONGEST_ORGAN, len(words)), 0, -1):
        if _is_organ(words[-count:]):
            return count
    return 0


def organ_at_start(words: Words) -> int:
    """How many of the first words name an organ; 0 for none."""
    for count in range(min(_LONGEST_ORGAN, len(words)), 0, -1):
        if _is_organ(words[:count]):
            return count
    return 0


def _is_organ(words: Words) -> bool:
    if all(word.isdigit() for word in words):
        return False
    try:
        return bool(find_organ(" ".join(words)))
    except AnatomyError:
        return False


def role_of(candidate: Candidate) -> Role:
    """By the name first, then by the innermost folder that says something."""
    if candidate.series is not None:
        return Role.scan
    *folders, name = (words_of(part) for part in candidate.parts)
    if _LABEL_WORDS & set(name):
        return Role.label
    if organ_at_end(name):
        return Role.mask
    if _SCAN_WORDS & set(name):
        return Role.scan
    for words in reversed(folders):
        if says_role_only(words):
            return Role.label if _LABEL_WORDS & set(words) else Role.scan
        if organ_at_end(words) == len(words) > 0:
            return Role.mask
    return Role.unclear


def says_role_only(words: Sequence[str]) -> bool:
    """Whether a folder's name says scan or label, and at most an organ besides."""
    rest = tuple(word for word in words if word not in _LABEL_WORDS | _SCAN_WORDS)
    return len(rest) < len(words) and (not rest or organ_at_end(rest) == len(rest))


def without_role(name: str) -> str:
    """A file's name without words for scan and label at its end: pat000-ct is pat000."""
    while found := re.fullmatch(r"(.*[^\W_])[\W_]+([^\W\d_]+)", name):
        if found[2].lower() not in _LABEL_WORDS | _SCAN_WORDS:
            break
        name = found[1]
    return name


def sort_by_role(
    candidates: Iterable[Candidate], looks_like_labels: Callable[[Path], bool]
) -> tuple[list[Candidate], list[Candidate]]:
    """Scans and labels. Where names leave it open, one file of a kind is looked at, and decides for its like."""
    scans: list[Candidate] = []
    labels: list[Candidate] = []
    known: dict[object, bool] = {}
    for candidate in candidates:
        role = role_of(candidate)
        if role in (Role.mask, Role.unclear):
            kind = candidate.like()
            if kind not in known:
                known[kind] = looks_like_labels(candidate.path)
            role = Role.label if known[kind] else Role.scan
        (labels if role is Role.label else scans).append(candidate)
    return scans, labels
