"""What every participant of a federation must agree on: an experiment without its sites and hardware."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from panorgan.anatomy import OwnOrgan, Vocabulary, declare_organs
from panorgan.anatomy.own_organs import refuse_undeclared
from panorgan.data.channels import plain_name
from panorgan.data.splits import SplitSettings
from panorgan.errors import ConfigError, did_you_mean
from panorgan.evaluation.postprocess import PRESETS
from panorgan.federation.limits import LimitSettings
from panorgan.federation.settings import TrainingSettings
from panorgan.methods.base import Method
from panorgan.methods.registry import find_method
from panorgan.networks import UNetSettings
from panorgan.networks.organ_parts import refuse_part_names
from panorgan.preparation.augment import refuse_swapped_sides
from panorgan.preparation.plan import POOLED, PlanSettings
from panorgan.preparation.sampling import sliced_axis
from panorgan.settings import SettingError, Settings, validated

_CHANNEL_NAME = r"[A-Za-z0-9][A-Za-z0-9 _.+-]{0,63}"


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
    postprocess: str = Field("pieces", description="a preset that cleans the final predictions")

    @field_validator("organs", mode="before")
    @classmethod
    def _bare_organs_will_do(cls, organs: Any) -> Any:
        return organs_by_name(organs)

    @field_validator("organs")
    @classmethod
    def _known_from_here_on(cls, organs: dict[str, OwnOrgan]) -> dict[str, OwnOrgan]:
        """Declare them now: fields are read in order, and the vocabulary, which follows, may name these organs."""
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
        """Derive the number of network inputs; several channels are standardised one by one."""
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
        """Leave out unused sections that older versions do not have, so that their fingerprints stay valid."""
        content: dict[str, Any] = write(self)
        return {key: value for key, value in content.items() if key not in ("organs", "channels") or value}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Declare the organs again: another process does not know them yet."""
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
        """The same without the folder of a model to start from, which means nothing on other machines."""
        start = self.training.start_from
        if start is None:
            return self
        training = self.training.model_copy(update={"start_from": start.model_copy(update={"folder": None})})
        return self.model_copy(update={"training": training})

    def fingerprint(self) -> str:
        """Equal for experiments with equal results; ignores name, hardware and the folder of a model to start from."""
        places = {"training": {"start_from": {"folder", "name"}}}
        content = self.model_dump(mode="json", exclude={"hardware": True, "name": True, **places})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def organs_by_name(organs: Any) -> Any:
    """`organs: [prostate_apex]` and `prostate_apex:` without a value are enough."""
    if isinstance(organs, list):
        return {str(name): {} for name in organs}
    return {name: {} if own is None else own for name, own in organs.items()} if isinstance(organs, dict) else organs
