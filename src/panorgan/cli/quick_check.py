"""Mistakes that show without torch, and so before it is imported, which takes seconds.

What passes here is checked again in full. `setting_names.json` is written from the settings themselves
(`scripts/describe_methods.py`) and holds a hash of their source files. Where these differ, or another package brings
methods, names are left to the full check.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from panorgan.errors import ConfigError, PanorganError, RunError, did_you_mean
from panorgan.methods.about.stored import stored_methods
from panorgan.overrides import read_overridden
from panorgan.settings import unknown_setting
from panorgan.yaml_files import read_yaml

FILE = Path(__file__).with_name("setting_names.json")
PACKAGE = Path(__file__).parents[1]
_ANY_NAME = "*"
"""Stands in the tree of names for the keys of a mapping, such as the sites."""


def check_experiment_file(path: Path, overrides: Sequence[str] = (), data: bool = True) -> None:
    """Refuse a missing or malformed file, and unknown names of settings, methods and organs in it and in `--set`.

    `data`: refuse data folders that do not exist too.
    """
    content = read_yaml(path, "experiment file")
    where, beside = str(path), path.parent if data else None
    read_overridden(content, overrides, where, lambda changed: _check_content(changed, where, beside))


def check_method_names(methods: str, option: str) -> None:
    """Refuse unknown methods in `a,b+mu=0.1,label=c`; values with commas of their own are left to the full check."""
    for entry in methods.split(",") if not set("[{") & set(methods) else ():
        if head := entry.strip().partition("+")[0]:
            _check_method(head.rpartition("=")[2], f"{option} {entry.strip()}")


def check_run_exists(path: Path) -> None:
    """Refuse the path of a run, a model or a kit where there is nothing, or a file."""
    if path.is_dir():
        return
    if path.exists():
        whole = any((path.parent / name).is_file() for name in ("model.json", "manifest.json"))
        raise RunError(
            "This is a file, not the folder of a run or a model.",
            code="run-is-a-file",
            where=str(path),
            fix=f"Give its folder: {path.parent}"
            if whole
            else "Give the folder of a run or a model; where a command takes scans too, the model comes first.",
        )
    children = path.parent.iterdir() if path.parent.is_dir() else ()
    beside = sorted(child.name for child in children if child.is_dir() and not child.name.startswith("."))
    near = did_you_mean(path.name, beside)
    raise RunError(
        "There is no such folder.",
        code="run-missing",
        where=str(path),
        why=near or (f"{path.parent}/ holds {', '.join(beside[:8])}" if beside else ""),
        fix="Check the path.",
    )


def _check_content(content: Mapping[str, Any], where: str, beside: Path | None) -> None:
    if (names := _stored_names()) is not None:
        for place, known in _unknown(content, names, ()):
            raise unknown_setting(place[-1], known, f"{where}: {'.'.join(place)}")
    _check_method(content.get("method"), where)
    _check_organs(content, where)
    if beside is not None:
        _check_folders(content, beside)


def _check_method(choice: Any, where: str) -> None:
    name = choice.get("name") if isinstance(choice, Mapping) else choice
    stored = stored_methods()
    if stored is None or not isinstance(name, str):
        return
    prefix = f"{where}: " if where else ""
    if name not in stored.methods:
        raise ConfigError(
            f"There is no method called {name!r}.",
            code="unknown-method",
            where=f"{prefix}method.name",
            why=did_you_mean(name, stored.methods),
            fix=f"Choose one of: {', '.join(sorted(stored.methods))} ('panorgan methods' describes them). A method of "
            "your own is found by commands where an installed package names it as an entry point.",
        )
    known = sorted(field.name for field in stored.methods[name].fields)
    for key in choice if isinstance(choice, Mapping) else ():
        if key not in (*known, "name"):
            raise unknown_setting(str(key), known, f"{prefix}method: {key}")


def _check_organs(content: Mapping[str, Any], where: str) -> None:
    from panorgan.anatomy import Vocabulary

    names = content.get("vocabulary")
    if content.get("organs") or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return
    try:
        Vocabulary(tuple(names))
    except PanorganError as error:
        error.where = error.where or where
        raise


def _check_folders(content: Mapping[str, Any], beside: Path) -> None:
    from panorgan.data.places import with_data_folder

    sites = content.get("sites")
    for name, site in sites.items() if isinstance(sites, Mapping) else ():
        for key in ("folder", "withheld"):
            place = site.get(key) if isinstance(site, Mapping) else None
            if isinstance(place, str) and not (folder := (beside / with_data_folder(place)).resolve()).exists():
                from panorgan.data.layouts.base import missing_folder  # imports readers of scans

                raise missing_folder(folder, str(name))


# -- names of settings -------------------------------------------------------------------------------------------


def _unknown(
    content: Any, names: Mapping[str, Any], place: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Every name that is no setting, with the settings of its group."""
    for key, value in content.items() if isinstance(content, Mapping) else ():
        inner = names.get(_ANY_NAME, names.get(str(key), ...))
        if inner is ...:
            yield (*place, str(key)), sorted(names)
        elif inner is not None:
            yield from _unknown(value, inner, (*place, str(key)))


def _stored_names() -> Mapping[str, Any] | None:
    """The tree of names; None where the settings may have changed since it was written."""
    try:
        content = json.loads(FILE.read_text(encoding="utf-8"))
        return content["names"] if content["hash"] == _hash(content["sources"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def file_content(model: type[BaseModel]) -> str:
    """The text of `setting_names.json`."""
    sources = sorted({Path(inspect.getfile(one)).relative_to(PACKAGE).as_posix() for one in _models(model)})
    content = {"hash": _hash(sources), "sources": sources, "names": _names(model)}
    return json.dumps(content, indent=1) + "\n"


def _names(model: type[BaseModel]) -> dict[str, Any]:
    """Names of the settings; those inside a group, None for a value."""
    return {name: _inside(field.annotation) for name, field in model.model_fields.items()}


def _inside(annotation: Any) -> dict[str, Any] | None:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return _names(annotation)
    inner = [found for one in get_args(annotation) if (found := _inside(one)) is not None]
    if not inner or get_origin(annotation) in (list, tuple):
        return None
    return {_ANY_NAME: inner[0]} if get_origin(annotation) is dict else inner[0]


def _models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A model, those that it inherits from, and those of its groups."""
    yield from (one for one in model.__mro__ if issubclass(one, BaseModel) and one.__module__.startswith("panorgan."))
    for field in model.model_fields.values():
        for one in (field.annotation, *get_args(field.annotation)):
            if inspect.isclass(one) and issubclass(one, BaseModel):
                yield from _models(one)


def _hash(sources: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        digest.update((PACKAGE / source).read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:32]
