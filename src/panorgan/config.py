"""An experiment: one YAML file, checked key by key. `--set a.b=c` overrides a setting."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from panorgan.agreement import Agreement, organs_by_name
from panorgan.anatomy import Vocabulary
from panorgan.data.layouts import AUTO
from panorgan.data.places import with_data_folder
from panorgan.errors import ConfigError
from panorgan.evaluation.forgetting import GLOBAL_MODEL
from panorgan.federation.local_models import round_to_keep
from panorgan.federation.settings import refuse_few_sites
from panorgan.federation.start_settings import with_resolved_start
from panorgan.overrides import as_assignments, read_overridden
from panorgan.phantom import PhantomConfig
from panorgan.settings import SettingError, Settings, validated
from panorgan.yaml_files import read_yaml


class SiteSettings(Settings):
    """One site of a simulated federation: its data folder, and which part of it is used."""

    folder: Path = Field(description="its data folder")
    layout: str = Field(AUTO, description="how the folder is laid out; detected if left out")
    annotated: tuple[str, ...] | None = Field(None, description="structures to use; all that is annotated if left out")
    labels: dict[str, str] = Field(default_factory=dict, description="what names in the folder mean: {its name: organ}")
    ignore: tuple[str, ...] = Field((), description="names in the folder to leave out")
    channels: dict[str, str] = Field(
        default_factory=dict, description="what the folder's names of channels mean: {its name: channel}"
    )
    leave_out: tuple[str, ...] = Field(
        (), description="cases or patients not to use, such as a scan that is there twice"
    )
    part: tuple[int, int] | None = Field(None, description="[i, n]: only part i of n of the folder's patients")
    external: bool = Field(False, description="scored, never trained on")
    withheld: Path | None = Field(
        None, description="folder with full labels, for scoring and for bounds such as central_full only"
    )
    joins_at: int | None = Field(
        None,
        ge=2,
        description="first round, counted over the whole run, in which the site takes part; from the first if left "
        "out. Methods that pool all data in one place ignore it",
    )

    @model_serializer(mode="wrap")
    def _without_channels(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out an unused setting that older versions do not have, as in an agreement."""
        content: dict[str, Any] = write(self)
        return {key: value for key, value in content.items() if key != "channels" or value}

    @model_validator(mode="after")
    def _only_who_trains_joins(self) -> SiteSettings:
        if self.external and self.joins_at is not None:
            raise SettingError(
                "an external site never joins: leave out joins_at, or external", code="external-site-joins"
            )
        return self

    @field_validator("part")
    @classmethod
    def _a_real_part(cls, part: tuple[int, int] | None) -> tuple[int, int] | None:
        if part is not None and not 1 <= part[0] <= part[1]:
            raise SettingError(
                "part is [i, n] with 1 ≤ i ≤ n, such as [1, 2] for the first half of the patients", code="bad-part"
            )
        return part


class HardwareSettings(Settings):
    """The hardware of this machine; not part of the experiment's identity."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(None, ge=1, description="CPU threads; all cores if left out")
    workers: int | None = Field(
        None, ge=1, description="cases prepared at the same time; one per core, at most 8, if left out"
    )
    deterministic: bool = Field(True, description="the same bits every time on a GPU too, at some cost in speed")


class Experiment(Agreement):
    """An agreement, and the sites of a federation that is simulated on this machine."""

    sites: dict[str, SiteSettings] = Field(default_factory=dict)
    phantom: PhantomConfig | None = Field(None, description="generate the sites instead of reading them")
    local_models: float = Field(
        0.0,
        ge=0,
        le=1,
        description="keep every site's model from before averaging, and score it too: shows what a site "
        "forgets. A share of the training rounds selects the round: 0.4, or true for the last one",
    )
    hardware: HardwareSettings = HardwareSettings()

    @model_validator(mode="before")
    @classmethod
    def _phantom_shares_the_vocabulary(cls, content: Any) -> Any:
        """Organs are named once: a phantom uses the vocabulary, or defines it if the file has none."""
        if isinstance(content, dict) and isinstance(content.get("phantom"), dict):
            phantom = dict(content["phantom"])
            if content.get("vocabulary"):
                phantom.setdefault("organs", Vocabulary(content["vocabulary"]).organs)
            return {"vocabulary": validated(PhantomConfig, phantom, "phantom").organs, **content, "phantom": phantom}
        return content

    @field_validator("sites")
    @classmethod
    def _plain_site_names(cls, sites: dict[str, SiteSettings]) -> dict[str, SiteSettings]:
        for name in sites:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                raise SettingError(
                    f"site name {name!r} may hold letters, digits, '-' and '_' only", code="bad-site-name"
                )
        return sites

    @model_validator(mode="after")
    def _one_source_of_sites(self) -> Experiment:
        if bool(self.sites) == (self.phantom is not None):
            raise SettingError("give either 'sites' (your data) or 'phantom' (generated data)", code="sites-or-phantom")
        return self

    @model_validator(mode="after")
    def _enough_sites_to_leave_some_out(self) -> Experiment:
        refuse_few_sites(self.training, len(self._training_sites()), "training.aggregation")
        return self

    @model_validator(mode="after")
    def _late_sites_do_join(self) -> Experiment:
        method, late = self.build_method(), self.late_sites()
        rounds = sum(stage.rounds for stage in method.stages(self.training.rounds))
        for name, first in sorted(late.items()):
            if first > rounds:
                raise ConfigError(
                    f"Site {name} would never join.",
                    code="never-joins",
                    where=self._place_of(name),
                    why=f"joins_at is round {first}, and {method.name} has {rounds} rounds in all",
                    fix=f"Choose a round up to {rounds}, or raise training.rounds.",
                )
        beginners = len(self._training_sites()) - len(late)
        if late and beginners < self.training.min_sites:
            raise ConfigError(
                f"{beginners or 'No'} {'site takes' if beginners < 2 else 'sites take'} part in the first round, "
                f"{self.training.min_sites} must (training.min_sites).",
                code="too-few-beginners",
                where=self._place_of(min(late)),
                why=f"joins_at lets {', '.join(sorted(late))} come later",
                fix="Leave joins_at out for those that begin.",
            )
        return self

    @model_validator(mode="after")
    def _local_models_of_all(self) -> Experiment:
        if self.local_models and GLOBAL_MODEL in self._training_sites():
            raise SettingError(
                f"with local_models, no site may be called {GLOBAL_MODEL!r}: the averaged model is",
                code="reserved-site-name",
            )
        kept = round_to_keep(self.build_method().stages(self.training.rounds), self.local_models)
        if self.local_models and (late := [site for site, first in self.late_sites().items() if first > kept]):
            raise SettingError(
                f"local_models keeps those of round {kept}, when {', '.join(late)} has not joined yet",
                code="local-models-before-join",
            )
        return self

    def late_sites(self) -> dict[str, int]:
        """Sites that join after the first round, with that round; none if data is pooled."""
        if self.build_method().pooled:
            return {}
        return {name: first for name, first in self._training_sites().items() if first is not None}

    def _training_sites(self) -> dict[str, int | None]:
        """The sites that train, each with its `joins_at`."""
        sites = self.sites if self.phantom is None else {site.name: site for site in self.phantom.sites}
        return {name: site.joins_at for name, site in sites.items() if not site.external}

    def _place_of(self, site: str) -> str:
        return f"sites.{site}.joins_at" if self.phantom is None else f"phantom site {site!r}, joins_at"

    def with_method(self, name: str, **numbers: Any) -> Experiment:
        """The same experiment with another method."""
        return Experiment(**{**self.model_dump(), "method": {"name": name, **numbers}})

    def agreement(self) -> Agreement:
        """The same without sites and hardware, for a federation between hospitals."""
        return Agreement(**self.model_dump(exclude=LOCAL_KEYS))


LOCAL_KEYS = {"sites", "phantom", "hardware", "local_models"}
"""Sections of an experiment file that apply only to one machine or to a simulation."""


def load_experiment(
    source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Experiment:
    """Read and check an experiment.

    Parameters
    ----------
    source : an experiment file, or its content as a dict. Folders in it are relative to the file, or to the working
        directory; `$PANORGAN_DATA` at their beginning is the folder of public data sets.
    overrides : settings to change, as `["training.rounds=20"]` or `{"training.rounds": 20}`.
    """
    if isinstance(source, Mapping):
        content, where, beside = source, "experiment", Path()
    else:
        content, where, beside = read_yaml(Path(source), "experiment file"), str(source), Path(source).parent

    def read(content: dict[str, Any]) -> Experiment:
        sites = content.get("sites")
        for site in sites.values() if isinstance(sites, dict) else ():
            for key in ("folder", "withheld"):
                if isinstance(site, dict) and isinstance(site.get(key), str | Path):
                    site[key] = str((beside / with_data_folder(site[key])).resolve())
        return parse_experiment(with_resolved_start(content, beside), where)

    return read_overridden(content, as_assignments(overrides), where, read)


def load_agreement(path: Path, organs: Mapping[str, Any] | None = None) -> Agreement:
    """Read an experiment file for use between hospitals, without its sites and hardware.

    `organs` are further organs that the catalogue does not have, as a federation file may describe them.
    """
    content = with_resolved_start(read_yaml(path, "experiment file"), path.parent)
    if organs:
        content["organs"] = _joined(organs_by_name(content.get("organs") or {}), organs, str(path))
    if "phantom" in content or "sites" in content:
        return parse_experiment(content, str(path)).agreement()
    return validated(Agreement, {k: v for k, v in content.items() if k not in LOCAL_KEYS}, str(path))


def _joined(organs: Any, more: Mapping[str, Any], where: str) -> Any:
    """The organs described in an experiment file and in the federation file that names it."""
    twice = sorted(organs.keys() & more.keys()) if isinstance(organs, dict) else []
    if twice:
        raise ConfigError(
            f"{twice[0]!r} is described in the federation file and in its experiment file.",
            code="organ-described-twice",
            where=f"{where}: organs.{twice[0]}",
            fix="Keep one of the two.",
        )
    return {**organs, **more} if isinstance(organs, dict) else organs


def parse_experiment(content: Mapping[str, Any], where: str = "") -> Experiment:
    """An experiment from plain data; errors name the setting and the fix."""
    return validated(Experiment, content, where)
