"""The entries of a comparison: methods and seeds, as written in a request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from panorgan.config import Experiment, parse_experiment
from panorgan.errors import ConfigError

SECTIONS = ("network", "training")
"""Sections of an experiment that a method entry may set besides the method's own settings."""


@dataclass(frozen=True)
class Kind:
    """What is compared: the names of its files, what one entry is, and the command-line option.

    `mend` says how to resolve two equal entries, `naming` how an entry gets a name.
    """

    name: str
    thing: str
    option: str
    mend: str
    naming: str = ""


COMPARISON = Kind("comparison", "method", "--methods", "Leave one out.", ": name=method+setting=value")

_LABEL = r"[A-Za-z0-9][A-Za-z0-9_. -]*"


@dataclass(frozen=True)
class Entry:
    """One method of a comparison, as written: `flkd`, `flkd+local_weight=0`, `global_only=flkd+local_weight=0`."""

    label: str
    method: str
    settings: Mapping[str, Any]

    @property
    def folder(self) -> str:
        """A name for the file system."""
        return re.sub(r"[^A-Za-z0-9_.+=-]", "_", self.label)

    def applied_to(self, experiment: Experiment, option: str = COMPARISON.option) -> Experiment:
        """The experiment with this method; the file's own settings apply where it names the same method."""
        content = experiment.model_dump()
        same = experiment.method if experiment.method["name"] == self.method else {}
        content["method"] = {**same, "name": self.method}
        for key, value in self.settings.items():
            section, dot, rest = key.partition(".")
            place, last = (content[section], rest) if dot and section in SECTIONS else (content["method"], key)
            *parents, last = last.split(".")
            for name in parents:
                place[name] = dict(place[name]) if isinstance(place.get(name), Mapping) else {}
                place = place[name]
            place[last] = value
        return parse_experiment(content, f"{option} {self.label}")


def parse_methods(methods: str | Sequence[str]) -> list[Entry]:
    """Parse `a,b+key=value,label=c`, or a list of such entries. Commas inside brackets belong to a value."""
    text = methods if isinstance(methods, str) else ",".join(methods)
    pieces = [piece.strip() for piece in _split_at_commas(text) if piece.strip()]
    if not pieces:
        raise ConfigError(
            "No method is named.",
            code="no-method",
            where="--methods",
            fix="Separate them by commas: --methods solo,fedavg.",
        )
    return [_parse_entry(piece) for piece in pieces]


def _split_at_commas(text: str) -> list[str]:
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces


def _parse_entry(text: str) -> Entry:
    head, *changes = re.split(r"\+(?=[A-Za-z_])", text)  # not the plus of 1e+3
    label, equals, method = head.partition("=")
    if equals and (not re.fullmatch(_LABEL, label) or not method):
        raise ConfigError(
            f"A method cannot be written {text!r}.",
            code="method-not-understood",
            where="--methods",
            fix="Use method, method+setting=value or name=method+setting=value.",
        )
    settings = {}
    for change in changes:
        key, equals_here, value = change.partition("=")
        if not key or not equals_here:
            raise ConfigError(
                f"A setting must look like name=value, not {change!r}.",
                code="setting-not-understood",
                where=f"--methods {text}",
                fix="Write it without spaces: flkd+local_weight=0.",
            )
        try:
            settings[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"The value of a setting is not valid YAML: {value!r}.",
                code="invalid-yaml",
                where=f"--methods {text}",
                why=str(error),
                fix="Close its brackets and quotes.",
            ) from error
    return Entry(label if equals else text, method if equals else head, settings)


def parse_seeds(seeds: str | Sequence[int]) -> tuple[int, ...]:
    """Parse `0,1,2`, or check a list of numbers."""
    text = seeds if isinstance(seeds, str) else ",".join(map(str, seeds))
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not pieces or not all(piece.isdecimal() for piece in pieces) or len(set(map(int, pieces))) < len(pieces):
        raise ConfigError(
            f"Seeds cannot be written {text!r}.",
            code="seeds-not-understood",
            where="--seeds",
            why="they are different whole numbers from 0 on",
            fix="Separate them by commas: --seeds 0,1,2.",
        )
    return tuple(int(piece) for piece in pieces)
