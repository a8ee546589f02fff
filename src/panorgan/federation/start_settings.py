"""`training.start_from`: the model whose weights training begins with.

A file names a folder. What everybody agrees on is the model itself: the hash of its weights, and the organs that they
serve. A site receives the weights with its first request, so it needs no folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from panorgan.checksums import read_json
from panorgan.errors import RunError
from panorgan.settings import Settings

WEIGHTS, CARD = "model.safetensors", "model.json"


class StartSettings(Settings):
    """A model to start from. A path is enough: the rest is read from the folder."""

    folder: Path | None = Field(
        None, description="a run folder or a model folder; needed where the run begins, not at the sites"
    )
    name: str = Field("", description="the model's name, for people")
    organs: tuple[str, ...] = Field((), description="its output channels, by which rows are matched")
    sha256: str = Field("", pattern=r"^([0-9a-f]{64})?$", description="of its file model.safetensors")

    @model_validator(mode="before")
    @classmethod
    def _read_from_the_folder(cls, content: Any) -> Any:
        if isinstance(content, str | os.PathLike):
            content = {"folder": content}
        if isinstance(content, Mapping) and content.get("folder") and not content.get("sha256"):
            return {**content, **described(Path(content["folder"]))}
        return content

    @model_serializer(mode="wrap")
    def _without_empty(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in write(self).items() if value}


def described(folder: Path) -> dict[str, Any]:
    """Name, organs and hash of the model in a folder."""
    folder = model_folder(folder)
    try:
        card = read_json((folder / CARD).read_bytes())
        return {"name": str(card["name"]), "organs": list(card["channels"]), "sha256": weights_hash(folder)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            "The model to start from cannot be read.",
            code="start-unreadable",
            where=str(folder),
            why=f"{type(error).__name__}: {error}",
            fix="Its files are damaged or incomplete. Copy the folder again.",
        ) from error


def weights_hash(folder: Path) -> str:
    """SHA-256 of the weights, as `sha256sum` prints it."""
    with (folder / WEIGHTS).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


IN_BUNDLE = Path("models", "panorgan")
"""Where an exported bundle holds the model as panorgan delivered it."""


def model_folder(folder: Path) -> Path:
    """The folder itself, or the model's inside a run or an exported bundle."""
    for place in (folder / "model", folder, folder / IN_BUNDLE):
        if (place / CARD).is_file():
            return place
    inside = sorted(path.parents[1].name for path in folder.glob(f"*/model/{CARD}"))
    raise RunError(
        "There is no model here.",
        code="no-model",
        where=str(folder),
        why="model.json is missing" + (f"; finished runs in this folder: {', '.join(inside[:8])}" if inside else ""),
        fix="Point to a finished run, to its 'model' folder, or to a bundle that panorgan exported.",
    )


def with_resolved_start(content: dict[str, Any], beside: Path) -> dict[str, Any]:
    """A file's content whose `training.start_from` is relative to the file's folder, as all its folders are."""
    training = content.get("training")
    start = training.get("start_from") if isinstance(training, dict) else None
    folder = start.get("folder") if isinstance(start, dict) else start
    if not isinstance(training, dict) or not isinstance(folder, str | Path):
        return content
    place = str((beside / Path(folder).expanduser()).resolve())
    moved = {**start, "folder": place} if isinstance(start, dict) else place
    return {**content, "training": {**training, "start_from": moved}}
