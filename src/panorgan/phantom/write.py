"""Writes a phantom federation to disk: an nnU-Net v2 raw folder per site, and the withheld labels."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from panorgan.checksums import DamagedError, OncePerProcess, file_checksum, read_json, sealed_json
from panorgan.errors import DataError
from panorgan.phantom.case import PhantomCase, case_id, generate_case
from panorgan.phantom.config import TUMOURS, PhantomConfig, PhantomSite

RECIPE = "phantom.json"
WITHHELD = "withheld"
FIRST_NUMBER = 11  # nnU-Net keeps 1 to 10 for the Medical Segmentation Decathlon
DRAWING = 1
"""Raised whenever the same config draws other images than before."""

Task = tuple[PhantomConfig, PhantomSite, int, Path, Path]
"""Config, site, number of the case, the site's own folder and the one with its withheld labels."""


_WHOLE = OncePerProcess()


class DamagedPhantomError(DataError):
    """A file of the phantoms is not what was written."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            "A generated scan or its description is gone or damaged.",
            code="phantom-damaged",
            where=str(path),
            fix="Delete the folder and generate it again.",
        )


def write_federation(
    config: PhantomConfig,
    folder: Path,
    on_case: Callable[[str, int, int], None] | None = None,
    workers: int = 1,
    plain: bool = False,
    remake: bool = False,
) -> dict[str, Path]:
    """Generate every site's cases into `folder`, or reuse them if they are already there.

    The folder appears only once it is complete. `on_case` hears (case id, cases done, cases in all). `plain`: folders
    are called as the sites are, not as nnU-Net numbers its data sets. `remake`: what is damaged is generated again
    instead of being refused. Returns each site's folder by site name.
    """
    folder = Path(folder)
    wanted = recipe(config, plain)
    try:
        if _is_there(wanted, folder):
            return site_folders(config, folder, plain)
    except DamagedPhantomError:
        if not remake:
            raise
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(mkdtemp(prefix=f".{folder.name}-", suffix="-building", dir=folder.parent))
    try:
        _write_descriptions(config, building, plain)
        own = site_folders(config, building, plain)
        tasks: list[Task] = [
            (config, site, index, own[site.name], withheld_folder(building, site.name))
            for site in config.sites
            for index in range(site.cases)
        ]
        for done, name in enumerate(_write_cases(tasks, workers), start=1):
            if on_case is not None:
                on_case(name, done, len(tasks))
        files = {path.relative_to(building).as_posix(): file_checksum(path) for path in _files(building)}
        (building / RECIPE).write_text(sealed_json({**wanted, "files": files}, indent=2) + "\n", encoding="utf-8")
        building.chmod(0o755)
        try:
            os.rename(building, folder)
        except OSError:
            # Another process may have finished the same federation meanwhile.
            if not _is_there(wanted, folder):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return site_folders(config, folder, plain)


def site_folders(config: PhantomConfig, folder: Path, plain: bool = False) -> dict[str, Path]:
    """The dataset folder of each site."""
    if plain:
        return {site.name: folder / site.name for site in config.sites}
    numbered = enumerate(config.sites, start=FIRST_NUMBER)
    return {site.name: folder / f"Dataset{number:03d}_{site.name}" for number, site in numbered}


def withheld_folder(folder: Path, site: str) -> Path:
    """Where the full labels of a site lie; for scoring only."""
    return folder / WITHHELD / site


def recipe(config: PhantomConfig, plain: bool = False) -> dict[str, Any]:
    """What `phantom.json` holds: all that decides the content of the folder."""
    content = config.as_json()
    for site in content["sites"]:
        del site["joins_at"]  # when a site joins changes none of its scans
    return {"drawing": DRAWING, "config": content, **({"folders": "plain"} if plain else {})}


def label_ids(names: Iterable[str]) -> dict[str, int]:
    """Label ids in nnU-Net's form; tumours come last because they are painted over their organs."""
    ordered = sorted(names, key=lambda name: name in TUMOURS)
    return {"background": 0, **{name: number for number, name in enumerate(ordered, start=1)}}


def label_map(case: PhantomCase, ids: dict[str, int]) -> NDArray[np.uint8]:
    """One integer per voxel; a later label covers an earlier one."""
    labels = np.zeros(case.hu.shape, dtype=np.uint8)
    for name, number in ids.items():
        if number:
            labels[case.masks[name]] = number
    return labels


def _is_there(wanted: dict[str, Any], folder: Path) -> bool:
    """Whether `folder` already holds exactly what the recipe says; refuses a folder that holds something else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    fix = "choose another folder, or delete this one to generate it again"
    try:
        found = read_json((folder / RECIPE).read_bytes())
    except DamagedError as error:
        raise DamagedPhantomError(folder / RECIPE) from error
    except (OSError, ValueError) as error:
        raise DataError(
            "The folder for the phantoms holds other files.",
            code="folder-holds-other-files",
            where=str(folder),
            why=f"no readable {RECIPE}",
            fix=fix,
        ) from error
    files = found.pop("files", {}) if isinstance(found, dict) else {}
    if found != wanted:
        raise DataError(
            "The folder holds phantoms of another config.",
            code="phantom-of-other-config",
            where=str(folder / RECIPE),
            why="differs in: " + ", ".join(_differences(found, wanted)),
            fix=fix,
        )
    for name, expected in files.items():
        if not _WHOLE.holds(folder / name, lambda path, expected=expected: file_checksum(path) == expected):  # type: ignore[misc]
            raise DamagedPhantomError(folder / name)
    return True


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _differences(found: Any, wanted: dict[str, Any]) -> list[str]:
    """Names of the top settings that differ."""
    old = found.get("config", {}) if isinstance(found, dict) else {}
    names = [name for name, value in wanted["config"].items() if old.get(name) != value]
    if not names and isinstance(found, dict) and found.get("folders") != wanted.get("folders"):
        return ["the names of the folders"]
    return names or ["the version of the drawing"]


def _write_descriptions(config: PhantomConfig, folder: Path, plain: bool) -> None:
    """The dataset.json files and empty folders of every site."""
    for site in config.sites:
        own = site_folders(config, folder, plain)[site.name]
        hidden = withheld_folder(folder, site.name)
        (own / "imagesTr").mkdir(parents=True)
        (hidden / "labelsTr").mkdir(parents=True)
        if not site.external:
            (own / "labelsTr").mkdir()
        _dump(own / "dataset.json", _description(() if site.external else site.annotated, site.cases))
        _dump(hidden / "dataset.json", _description(config.organs, site.cases))


def _description(names: Iterable[str], cases: int) -> dict[str, Any]:
    return {
        "channel_names": {"0": "CT"},
        "labels": label_ids(names),
        "numTraining": cases,
        "file_ending": ".nii.gz",
    }


def _write_cases(tasks: list[Task], workers: int) -> Iterator[str]:
    """Write all cases, in order; in fresh processes when there is more than one worker."""
    if workers <= 1:
        yield from map(_write_case, tasks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=workers, mp_context=context) as pool:
        yield from pool.map(_write_case, tasks)


def _write_case(task: Task) -> str:
    """Write the image, the site's labels and the withheld labels of one case; returns its id."""
    config, site, index, own, hidden = task
    case = generate_case(config, site, index)
    name = case_id(site, index)
    _save(case.hu, case.affine, own / "imagesTr" / f"{name}_0000.nii.gz")
    if not site.external:
        _save(label_map(case, label_ids(site.annotated)), case.affine, own / "labelsTr" / f"{name}.nii.gz")
    _save(label_map(case, label_ids(config.organs)), case.affine, hidden / "labelsTr" / f"{name}.nii.gz")
    return name


def _save(array: NDArray[Any], affine: NDArray[np.float64], path: Path) -> None:
    image = nib.Nifti1Image(array, affine)
    image.set_qform(affine, code=1)
    image.set_sform(affine, code=1)
    image.header.set_xyzt_units("mm")
    nib.save(image, path)


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
