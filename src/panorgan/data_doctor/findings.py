"""What the doctor looks at, and what it finds: plain data that a table, a page or a program can show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from panorgan.anatomy import Vocabulary


class Severity(IntEnum):
    """How bad it is. *error*: training would fail or learn nonsense. *warning*: look at it. *note*: good to know."""

    note = 0
    warning = 1
    error = 2


@dataclass(frozen=True)
class Source:
    """A folder to check, and how the experiment file (if there is one) reads it.

    Parameters
    ----------
    site : the site's name, or the folder's where no experiment is given.
    vocabulary : the organs in question; None means every organ that the catalogue knows.
    rename, ignore, restrict : as for `read_cases`.
    splits : split (train, validation, test) by case id, where an experiment says it.
    patients : only these patients belong to the site; None means all.
    leave_out : cases or patients that are not used.
    external : scored, never trained on: need not annotate anything.
    modality : CT where the experiment's plan is for CT; what the data itself says comes first.
    channels, channel_names : as for `read_cases`; without an experiment all channels of the folder are checked.
    """

    site: str
    folder: Path
    layout: str = "auto"
    vocabulary: Vocabulary | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    restrict: tuple[str, ...] | None = None
    splits: Mapping[str, str] = field(default_factory=dict)
    patients: frozenset[str] | None = None
    external: bool = False
    leave_out: tuple[str, ...] = ()
    modality: str = ""
    channels: tuple[str, ...] = ()
    channel_names: Mapping[str, str] = field(default_factory=dict)

    def uses(self, case: str, patient: str) -> bool:
        """Whether a case of the folder belongs to this source."""
        ours = self.patients is None or patient in self.patients
        return ours and case not in self.leave_out and patient not in self.leave_out


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or may be.

    Parameters
    ----------
    code : short and stable, such as `grid-mismatch`; documented in `CODES`.
    case : case id; empty for a finding about a whole folder.
    what, why, fix : one sentence each. `fix` is a command or a line for the experiment file where there is one.
    """

    code: str
    severity: Severity
    site: str
    case: str
    what: str
    why: str
    fix: str
    file: str = ""
    structure: str = ""


@dataclass(frozen=True)
class Thumbnail:
    """One slice to look at: `grey` [rows, columns] 0–255, `labels` of the same shape (0 nothing, i + 1 `names[i]`).

    Turned as radiologists look: patient's right on the left of the picture, front (or head) on top.
    `pixel_mm` is the size of a pixel as (row height, column width).
    """

    grey: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    names: tuple[str, ...]
    plane: str
    pixel_mm: tuple[float, float]


@dataclass(frozen=True)
class StructureFacts:
    """What a mask looks like. `centre_mm` in RAS millimetres, NaN where empty; `median` is the image's inside it."""

    name: str
    voxels: int
    volume_ml: float
    centre_mm: tuple[float, float, float]
    pieces: int
    largest_piece: float
    median: float


@dataclass(frozen=True)
class CaseFacts:
    """What was read of one case. Fields that could not be read keep their empty defaults.

    `content` is a hash of voxels and shape (not of the file: another compression is still the same scan);
    `label_content` the same of the label files, empty where nothing is drawn. `folder` is the source's.
    """

    site: str
    case: str
    patient: str
    image: Path
    label_files: tuple[Path, ...] = ()
    split: str = ""
    shape: tuple[int, ...] = ()
    spacing_mm: tuple[float, float, float] | None = None
    orientation: str = ""
    modality: str = ""
    intensity: Mapping[str, float] = field(default_factory=dict)
    content: str = ""
    structures: tuple[StructureFacts, ...] = ()
    thumbnail: Thumbnail | None = None
    label_content: str = ""
    folder: Path = Path()


@dataclass(frozen=True)
class Checkup:
    """Everything the doctor saw and found, worst first."""

    sources: tuple[Source, ...]
    layouts: Mapping[str, str]
    cases: tuple[CaseFacts, ...]
    findings: tuple[Finding, ...]

    @property
    def worst(self) -> Severity | None:
        """The worst severity found; None when nothing was found."""
        return max((finding.severity for finding in self.findings), default=None)
