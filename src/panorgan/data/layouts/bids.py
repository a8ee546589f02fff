"""BIDS: scans in `sub-*/…/`, segmentations in `derivatives/*/sub-*/…/*_dseg.nii.gz`, names in a `dseg.tsv`.

The table has the columns `index` and `name`. It lies next to the segmentation under the same name or, by BIDS's
inheritance, as `…dseg.tsv` in one of the folders above it. The nearest one counts.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from panorgan.data.dicom import walk_files
from panorgan.data.layouts.base import FoundImage, FoundLabelMap, FoundLabels, Layout, named_once, visible
from panorgan.errors import DataError

_SCAN_ENDING = ".nii.gz"
_NOT_SCANS = ("_dseg", "_mask", "_probseg")
# Entities that say how a derivative was made, not which scan it belongs to.
_OF_DERIVATIVES = ("desc-", "space-", "res-", "den-", "label-", "atlas-", "seg-")


def fits(folder: Path) -> bool:
    """A BIDS data set with at least one discrete segmentation among its derivatives."""
    return (folder / "dataset_description.json").is_file() and any(_segmentations(folder))


def images(folder: Path) -> dict[str, FoundImage]:
    """Every scan of a subject that has a segmentation; the segmentation names it."""
    return {name: image for name, (image, _) in _cases(folder)[0].items()}


def labels(folder: Path) -> dict[str, FoundLabels]:
    """Every segmentation with the names of its table."""
    return {name: segmentation for name, (_, segmentation) in _cases(folder)[0].items()}


def problems(folder: Path) -> tuple[DataError, ...]:
    """Segmentations without a scan or a table, and scans with several segmentations."""
    return _cases(folder)[1]


def _cases(folder: Path) -> tuple[dict[str, tuple[FoundImage, FoundLabelMap]], tuple[DataError, ...]]:
    """By the entities that name the scan: `sub-01_ses-2`."""
    once, twice = named_once(_segmentations(folder), lambda path: "_".join(_entities(path)))
    found = {}
    problems = {(error.what, error.where): error for error in twice.values()}
    for name, path in once.items():
        try:
            found[name] = (
                FoundImage(_scan_of(path, folder), name.split("_")[0]),
                FoundLabelMap(path, _ids(path, folder)),
            )
        except DataError as error:
            problems.setdefault((error.what, error.where), error)  # a bad table is reported once
    return found, tuple(problems.values())


def _segmentations(folder: Path) -> Iterator[Path]:
    for subject in visible(folder, "derivatives/*/sub-*"):
        yield from (path for path in walk_files(subject) if path.name.endswith("_dseg.nii.gz"))


def _entities(path: Path) -> list[str]:
    """`sub-01_ses-2_desc-manual_dseg.nii.gz` → sub-01, ses-2."""
    parts = path.name.removesuffix(_SCAN_ENDING).split("_")[:-1]
    return [part for part in parts if not part.startswith(_OF_DERIVATIVES)]


def _scan_of(segmentation: Path, folder: Path) -> Path:
    """The one scan with the same entities."""
    wanted = _entities(segmentation)
    scans = [
        path
        for path in walk_files(folder / wanted[0])
        if path.name.endswith(_SCAN_ENDING)
        and _entities(path) == wanted
        and not path.name.removesuffix(_SCAN_ENDING).endswith(_NOT_SCANS)
    ]
    if len(scans) != 1:
        raise DataError(
            f"A segmentation belongs to {'no scan' if not scans else 'several scans'}.",
            where=str(segmentation),
            why=", ".join(path.name for path in scans) or f"nothing in {wanted[0]} has the entities {'_'.join(wanted)}",
            fix="Name scan and segmentation with the same entities, such as sub-01_ses-2_…, or use a cases.csv.",
            code="several-scans-fit" if scans else "segmentation-without-scan",
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
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise DataError(
            "A segmentation's table cannot be understood.",
            where=str(table),
            why=f"{type(error).__name__}: {error}",
            fix="It must be tab-separated with the columns 'index' (a whole number) and 'name'.",
            code="label-names-unreadable",
        ) from error
    return ids


def _table_of(segmentation: Path, folder: Path) -> Path:
    own = segmentation.with_name(segmentation.name.removesuffix(_SCAN_ENDING) + ".tsv")
    if own.is_file():
        return own
    for place in segmentation.parents:
        tables = [path for path in visible(place, "*dseg.tsv") if not path.name.startswith("sub-")]
        if tables:
            return tables[0]
        if place == folder:
            break
    raise DataError(
        "A segmentation has no table that names its integers.",
        where=str(segmentation),
        fix="Put a dseg.tsv with the columns 'index' and 'name' next to it, or into the derivative's folder.",
        code="labels-without-names",
    )


LAYOUT = Layout("bids", "BIDS with segmentations among its derivatives", fits, images, labels, problems)
