"""One YAML file is one experiment. Unknown keys are refused with a hint; `--set a.b=c` overrides."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from panorgan.anatomy import OwnOrgan, Vocabulary, declare_organs
from panorgan.anatomy.own_organs import refuse_undeclared
from panorgan.data.channels import plain_name
from panorgan.data.layouts import AUTO
from panorgan.data.places import with_data_folder
from panorgan.data.splits import SplitSettings
from panorgan.errors import ConfigError, did_you_mean
from panorgan.evaluation.forgetting import GLOBAL_MODEL
from panorgan.evaluation.postprocess import PRESETS
from panorgan.federation.limits import LimitSettings
from panorgan.federation.local_models import round_to_keep
from panorgan.federation.settings import TrainingSettings, refuse_few_sites
from panorgan.federation.start_settings import with_resolved_start
from panorgan.methods.base import Method
from panorgan.methods.registry import find_method
from panorgan.networks import UNetSettings
from panorgan.networks.organ_parts import refuse_part_names
from panorgan.overrides import as_assignments, read_overridden
from panorgan.phantom import PhantomConfig
from panorgan.preparation.augment import refuse_swapped_sides
from panorgan.preparation.plan import POOLED, PlanSettings
from panorgan.preparation.sampling import sliced_axis
from panorgan.settings import SettingError, Settings, validated
from panorgan.yaml_files import read_yaml

_CHANNEL_NAME = r"[A-Za-z0-9][A-Za-z0-9 _.+-]{0,63}"


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
        """Leave out what was added later and is not used, as in an agreement."""
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


class Agreement(Settings):
    """What every participant of a federation must agree on: everything that affects the results."""

    name: str = Field("experiment", pattern=r"^[^./\\][^/\\]*$", description="names the run folder and the report")
    seed: int = Field(0, ge=0)
    organs: dict[str, OwnOrgan] = Field(default_factory=dict, description="organs that the catalogue does not know")
    vocabulary: tuple[str, ...] = Field(description="the organs that the federation segments")
    channels: tuple[str, ...] = Field(
        (), description="the channels that every scan has, such as MR sequences: [t1, t1ce, t2, flair]; one if left out"
    )
    method: dict[str, Any] = Field({"name": "fedavg"}, description="name, and the method's own numbers")
    splits: SplitSettings = SplitSettings()
    allow_shared_scans: bool = Field(
        False, description="continue although a scan is in two splits or at two sites; the report then says so"
    )
    plan: PlanSettings = PlanSettings()
    network: UNetSettings = UNetSettings()
    training: TrainingSettings = TrainingSettings()
    limits: LimitSettings = LimitSettings()
    postprocess: str = Field("none", description="a preset for the final predictions")

    @field_validator("organs", mode="before")
    @classmethod
    def _bare_organs_will_do(cls, organs: Any) -> Any:
        return organs_by_name(organs)

    @field_validator("organs")
    @classmethod
    def _known_from_here_on(cls, organs: dict[str, OwnOrgan]) -> dict[str, OwnOrgan]:
        """Fields are read in order: the vocabulary, which follows, may name these organs."""
        in_order = dict(sorted(organs.items()))  # a file that was written again may have them in another one
        declare_organs(in_order)
        refuse_part_names(in_order)
        return in_order

    @field_validator("vocabulary")
    @classmethod
    def _canonical(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return Vocabulary(names).organs

    @field_validator("channels")
    @classmethod
    def _plain_channel_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not re.fullmatch(_CHANNEL_NAME, name):
                raise SettingError(
                    f"channel name {name!r} may hold letters, digits, spaces and '_.+-' only", code="bad-channel-name"
                )
        if len({plain_name(name) for name in names}) < len(names):
            raise SettingError(f"a channel is named twice: {', '.join(names)}", code="channel-named-twice")
        return names

    @field_validator("postprocess")
    @classmethod
    def _known_preset(cls, name: str) -> str:
        if name not in PRESETS:
            raise ConfigError(
                f"There is no post-processing preset {name!r}.",
                code="unknown-postprocess",
                where="postprocess",
                why=did_you_mean(name, PRESETS),
                fix=f"Use one of: {', '.join(PRESETS)}.",
            )
        return name

    @field_validator("method", mode="before")
    @classmethod
    def _a_bare_name_will_do(cls, choice: Any) -> Any:
        return {"name": choice} if isinstance(choice, str) else choice

    @field_validator("method")
    @classmethod
    def _complete_method(cls, choice: dict[str, Any]) -> dict[str, Any]:
        """Check the method's own settings and fill in its defaults."""
        if "name" not in choice:
            raise SettingError("give the method's name, such as {name: fedavg}", code="method-without-name")
        method = find_method(str(choice["name"]))
        numbers = {key: value for key, value in choice.items() if key != "name"}
        return {"name": method.name, **validated(method.Config, numbers, "method").as_json()}

    @model_validator(mode="before")
    @classmethod
    def _channels_decide_what_follows(cls, content: Any) -> Any:
        """The network's inputs; and several channels are each standardised by themselves."""
        channels = content.get("channels") if isinstance(content, dict) else None
        if not isinstance(channels, list | tuple) or not channels:
            return content
        network, plan = content.get("network", {}), content.get("plan", {})
        if isinstance(network, dict):
            network = {"input_channels": len(channels), **network}
        if isinstance(plan, dict) and len(channels) > 1 and plan.get("intensity", POOLED) == POOLED:
            plan = {**plan, "intensity": "zscore"}
        return {**content, "network": network, "plan": plan}

    @model_validator(mode="after")
    def _channels_fit(self) -> Agreement:
        count = max(1, len(self.channels))
        if self.network.input_channels != count:
            raise SettingError(
                f"network.input_channels is {self.network.input_channels}, and scans have {count} "
                f"{'channels' if count > 1 else 'channel'}: leave it out, it follows from 'channels'",
                code="input-channels-differ",
            )
        if count > 1 and self.plan.intensity != "zscore":
            raise SettingError(
                "a window of Hounsfield units suits a single channel of CT: leave plan.intensity out, and every one "
                "of several channels is standardised by itself (zscore)",
                code="window-of-channels",
            )
        return self

    @model_validator(mode="after")
    def _describes_its_organs(self) -> Agreement:
        refuse_undeclared(self.vocabulary, self.organs)
        return self

    @model_serializer(mode="wrap")
    def _without_empty_sections(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what was added later and is not used: fingerprints of older experiments stay as they are."""
        content: dict[str, Any] = write(self)
        return {key: value for key, value in content.items() if key not in ("organs", "channels") or value}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Another process does not know the organs yet."""
        super().__setstate__(state)
        declare_organs(self.organs)

    @model_validator(mode="after")
    def _patches_fit_the_network(self) -> Agreement:
        patch = self.training.sampling.patch_size
        sliced = sliced_axis(patch)
        if self.network.dimensions == 2 and sliced is None:
            raise SettingError(
                f"a 2D network sees slices: put a 1 into training.sampling.patch_size {list(patch)} at the axis "
                "that the slices lie across, [x, y, 1] for axial ones, or set network.dimensions to 3",
                code="network-needs-slices",
            )
        if self.network.dimensions == 3 and sliced is not None:
            raise SettingError(
                f"a 3D network sees volumes: training.sampling.patch_size {list(patch)} must not hold a 1, "
                "or set network.dimensions to 2",
                code="network-needs-volumes",
            )
        sizes = [size for axis, size in enumerate(patch) if axis != sliced]
        divisors = self.network.divisor
        if any(size % divisor or size < 2 * divisor for size, divisor in zip(sizes, divisors, strict=True)):
            same = len(set(divisors)) == 1
            multiple, least = (divisors[0], 2 * divisors[0]) if same else (list(divisors), [2 * d for d in divisors])
            cause = "network.features" if self.network.strides is None else "network.features and network.strides"
            raise SettingError(
                f"training.sampling.patch_size {list(patch)} must be multiples of {multiple}, at least {least}, "
                f"for a network with {len(self.network.features)} levels ({cause})"
                + ("" if sliced is None else "; only the axis of the slices is 1"),
                code="patch-does-not-fit",
            )
        return self

    @model_validator(mode="after")
    def _sides_stay_apart(self) -> Agreement:
        refuse_swapped_sides(self.training.augment, self.vocabulary)
        return self

    @model_validator(mode="after")
    def _the_method_decides_first(self) -> Agreement:
        """A method may fix settings of the network: a conflicting choice must not be ignored silently."""
        decided = self.build_method().network_settings(self.network)
        for field in ("organs", "activation"):
            wished, used = getattr(self.network, field), getattr(decided, field)
            if wished not in (UNetSettings.model_fields[field].default, used):
                raise ConfigError(
                    f"{self.method['name']} cannot use a network with {field}: {wished}.",
                    code="method-decides",
                    where=f"network.{field}",
                    why=f"the method fixes it: {used}",
                    fix=f"Leave network.{field} out, or choose a method that does not fix it, such as fedavg.",
                )
        return self

    def build_method(self) -> Method:
        """The method with its config."""
        method = find_method(self.method["name"])
        return method(method.Config(**{k: v for k, v in self.method.items() if k != "name"}))

    def without_places(self) -> Agreement:
        """The same for other machines, where the folder of a model to start from means nothing."""
        start = self.training.start_from
        if start is None:
            return self
        training = self.training.model_copy(update={"start_from": start.model_copy(update={"folder": None})})
        return self.model_copy(update={"training": training})

    def fingerprint(self) -> str:
        """Equal for experiments with equal results; hardware, name and the place of a model to start from do not
        count."""
        places = {"training": {"start_from": {"folder", "name"}}}
        content = self.model_dump(mode="json", exclude={"hardware": True, "name": True, **places})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


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
        """Organs are named once: a phantom uses the vocabulary, or defines it where it is left out."""
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
        """Sites that are absent from the first round, with the round in which they join; none if data is pooled."""
        if self.build_method().pooled:
            return {}
        return {name: first for name, first in self._training_sites().items() if first is not None}

    def _training_sites(self) -> dict[str, int | None]:
        """Sites that train, with `joins_at`."""
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
"""Sections of an experiment file for one machine, or for a simulation, alone."""


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

    `organs` are further ones that the catalogue does not know, as a federation file may describe them.
    """
    content = with_resolved_start(read_yaml(path, "experiment file"), path.parent)
    if organs:
        content["organs"] = _joined(organs_by_name(content.get("organs") or {}), organs, str(path))
    if "phantom" in content or "sites" in content:
        return parse_experiment(content, str(path)).agreement()
    return validated(Agreement, {k: v for k, v in content.items() if k not in LOCAL_KEYS}, str(path))


def organs_by_name(organs: Any) -> Any:
    """`organs: [prostate_apex]` and `prostate_apex:` without a value are enough."""
    if isinstance(organs, list):
        return {str(name): {} for name in organs}
    return {name: {} if own is None else own for name, own in organs.items()} if isinstance(organs, dict) else organs


def _joined(organs: Any, more: Mapping[str, Any], where: str) -> Any:
    """Own organs of an experiment file and of the federation file that names it."""
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
    """An experiment from plain data, with errors a person can act on."""
    return validated(Experiment, content, where)
