"""BIDS: scans in `sub-*/…/`, segmentations in `derivatives/*/sub-*/…/*_dseg.nii.gz`, names in a `dseg.tsv`.

The table has the columns `index` and `name`. It lies beside the segmentation under the same name or, by BIDS's
inheritance, as `…dseg.tsv` in one of the folders above it. The nearest one counts.
"""

from __future__ import annotations

import csv
from pathlib import Path

from panorgan.cases.layouts.base import FoundImage, FoundLabelMap, FoundLabels, Layout
from panorgan.errors import DataError

_SCAN_ENDING = ".nii.gz"
_NOT_SCANS = ("_dseg", "_mask", "_probseg")
# Entities that say how a derivative was made, not which scan it belongs to.
_OF_DERIVATIVES = ("desc-", "space-", "res-", "den-", "label-", "atlas-", "seg-")


def fits(folder: Path) -> bool:
    """A BIDS data set with at least one discrete segmentation among its derivatives."""
    return (folder / "dataset_description.json").is_file() and bool(_segmentations(folder))


def images(folder: Path) -> dict[str, FoundImage]:
    """Every scan of a subject that has a segmentation; the segmentation names it."""
    found = {}
    for name, segmentation in _segmentations(folder).items():
        found[name] = FoundImage(_scan_of(segmentation, folder), name.split("_")[0])
    return found


def labels(folder: Path) -> dict[str, FoundLabels]:
    """Every segmentation with the names of its table."""
    return {name: FoundLabelMap(path, _ids(path, folder)) for name, path in _segmentations(folder).items()}


def _segmentations(folder: Path) -> dict[str, Path]:
    """By the entities that name the scan: `sub-01_ses-2`."""
    found = {}
    for path in sorted(folder.glob("derivatives/*/sub-*/**/*_dseg.nii.gz")):
        found["_".join(_entities(path))] = path
    return found


def _entities(path: Path) -> list[str]:
    """`sub-01_ses-2_desc-manual_dseg.nii.gz` → sub-01, ses-2."""
    parts = path.name.removesuffix(_SCAN_ENDING).split("_")[:-1]
    return [part for part in parts if not part.startswith(_OF_DERIVATIVES)]


def _scan_of(segmentation: Path, folder: Path) -> Path:
    """The one scan with the same entities."""
    wanted = _entities(segmentation)
    scans = [
        path
        for path in sorted((folder / wanted[0]).rglob(f"*{_SCAN_ENDING}"))
        if _entities(path) == wanted and not path.name.removesuffix(_SCAN_ENDING).endswith(_NOT_SCANS)
    ]
    if len(scans) != 1:
        raise DataError(
            f"A segmentation belongs to {'no scan' if not scans else 'several scans'}.",
            where=str(segmentation),
            why=", ".join(path.name for path in scans) or f"nothing in {wanted[0]} has the entities {'_'.join(wanted)}",
            fix="Name scan and segmentation with the same entities, such as sub-01_ses-2_…, or use a cases.csv.",
        )
    return scans[0]


def _ids(segmentation: Path, folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and integers of the nearest table."""
    table = _table_of(segmentation, folder)
    ids: dict[str, tuple[int, ...]] = {}
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                if int(row["index"]) != 0:
                    ids[row["name"]] = (*ids.get(row["name"], ()), int(row["index"]))
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(
            "A segmentation's table cannot be understood.",
            where=str(table),
            why=f"{type(error).__name__}: {error}",
            fix="It must be tab-separated with the columns 'index' (a whole number) and 'name'.",
        ) from error
    return ids


def _table_of(segmentation: Path, folder: Path) -> Path:
    own = segmentation.with_name(segmentation.name.removesuffix(_SCAN_ENDING) + ".tsv")
    if own.is_file():
        return own
    for place in segmentation.parents:
        tables = [path for path in sorted(place.glob("*dseg.tsv")) if not path.name.startswith("sub-")]
        if tables:
            return tables[0]
        if place == folder:
            break
    raise DataError(
        "A segmentation has no table that names its integers.",
        where=str(segmentation),
        fix="Put a dseg.tsv with the columns 'index' and 'name' beside it, or into the derivative's folder.",
    )


LAYOUT = Layout("bids", "BIDS with segmentations among its derivatives", fits, images, labels)
