"""nnU-Net v2 raw folders: `dataset.json`, `imagesTr/<case>_0000.nii.gz`, `labelsTr/<case>.nii.gz`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from panorgan.anatomy import Vocabulary, ancestors, find_organ
from panorgan.cases.case import Case, LabelMap
from panorgan.errors import AnatomyError, DataError


def read_cases(
    folder: Path,
    site: str,
    vocabulary: Vocabulary,
    labels_from: Path | None = None,
    restrict: tuple[str, ...] | None = None,
) -> list[Case]:
    """All cases of one folder.

    Parameters
    ----------
    labels_from : another folder of the same shape whose `dataset.json` and `labelsTr` are used instead
        (withheld labels for scoring).
    restrict : keep only these structures of what the folder annotates.
    """
    ending, _ = _read_description(folder)
    label_folder = labels_from or folder
    _, named_ids = _read_description(label_folder)
    ids = _structure_ids(named_ids, vocabulary, label_folder, restrict)
    declared = frozenset(i for values in named_ids.values() for i in values)
    images = sorted((folder / "imagesTr").glob(f"*_0000{ending}"))
    if not images:
        raise DataError(
            "A data folder holds no scans.",
            where=str(folder / "imagesTr"),
            why=f"no file is named <case>_0000{ending}",
            fix="Point to the folder that holds dataset.json and imagesTr.",
        )
    cases = []
    for image in images:
        case_id = image.name[: -len(f"_0000{ending}")]
        label_path = label_folder / "labelsTr" / f"{case_id}{ending}"
        if ids and not label_path.is_file():
            raise DataError(
                "A case has no label file.",
                where=str(label_path),
                fix="Add the file, or move the image out of imagesTr.",
            )
        labels = LabelMap(label_path, ids, declared) if ids else None
        cases.append(Case(case_id, case_id, site, image, tuple(sorted(ids)), labels))
    return cases


def _read_description(folder: Path) -> tuple[str, dict[str, tuple[int, ...]]]:
    """File ending and label ids per name, from `dataset.json`."""
    path = folder / "dataset.json"
    if not path.is_file():
        raise DataError(
            "This is not an nnU-Net data folder.",
            where=str(folder),
            why="it has no dataset.json" if folder.is_dir() else "the folder does not exist",
            fix="Point to the folder that holds dataset.json, imagesTr and labelsTr.",
        )
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        labels = content.get("labels", {})
        ids = {
            name: tuple(int(i) for i in value) if isinstance(value, list) else (int(value),)
            for name, value in labels.items()
            if name not in ("background", "ignore")
        }
        taken = [name for name, values in ids.items() if min(values, default=1) < 1]
        if taken:
            raise ValueError(f"{', '.join(taken)}: ids start at 1, 0 is the background")
        return str(content.get("file_ending", ".nii.gz")), ids
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            "dataset.json cannot be understood.",
            where=str(path),
            why=str(error),
            fix='It must be JSON with "labels": {"background": 0, "liver": 1, …}.',
        ) from error


def _structure_ids(
    named_ids: dict[str, tuple[int, ...]],
    vocabulary: Vocabulary,
    folder: Path,
    restrict: tuple[str, ...] | None,
) -> dict[str, tuple[int, ...]]:
    """Ids per annotated structure, inner structures and parts included."""
    try:
        by_organ: dict[str, tuple[int, ...]] = {}
        for name, ids in named_ids.items():  # two names may mean the same organ
            organ = find_organ(name).name
            by_organ[organ] = by_organ.get(organ, ()) + ids
        structures = vocabulary.resolve(tuple(by_organ), ignore_unknown=True)
        wanted = structures if restrict is None else vocabulary.resolve(restrict)
    except AnatomyError as error:
        raise DataError(error.what, where=str(folder / "dataset.json"), why=error.why, fix=error.fix) from error
    absent = sorted(set(wanted) - set(structures))
    if absent:
        raise DataError(
            f"The folder does not annotate {', '.join(absent)}.",
            where=str(folder / "dataset.json"),
            why=f"it annotates {', '.join(structures) or 'nothing of the vocabulary'}",
            fix="Correct 'annotated' of this site in the experiment file.",
        )
    return {
        structure: tuple(
            sorted({i for organ, ids in by_organ.items() if structure in (organ, *ancestors(organ)) for i in ids})
        )
        for structure in wanted
    }
