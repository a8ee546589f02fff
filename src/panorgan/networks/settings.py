"""The experiment's `network` section: the shape of the U-Net, and how it separates organs."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, PositiveInt, SerializerFunctionWrapHandler, model_serializer, model_validator

from panorgan.data.labels import CONVENTIONS, Activation
from panorgan.settings import SettingError, Settings

OrganParts = Literal["channels", "heads", "task_blocks", "decoders", "encoders"]


class UNetSettings(Settings):
    """Shape of the U-Net."""

    dimensions: Literal[2, 3] = 3
    features: tuple[PositiveInt, ...] = Field(
        (32, 64, 128, 256, 320), min_length=2, description="channels per level, top to bottom"
    )
    organs: OrganParts = Field(
        "channels",
        description="how organs are separated: channels of one output, or a head, task block, decoder or encoder for "
        "each; some methods choose this themselves",
    )
    norm: Literal["instance", "batch", "group"] = "instance"
    groups: PositiveInt = Field(8, description="groups of channels that norm: group averages over")
    weight_standardisation: bool = Field(
        False, description="convolutions use their weights with mean 0 and variance 1 per output channel"
    )
    residual: bool = Field(False, description="residual blocks in the encoder")
    activation: Activation = Field(
        "softmax",
        description="softmax over background + organs, or one sigmoid per organ; per-organ parts always use "
        "sigmoids; 'convention' (exclusive or independent) is the older name",
    )
    dropout: float = Field(0.0, ge=0, lt=1)
    organ_prior: float | None = Field(
        0.05, gt=0, lt=1, description="initial probability of every organ, set by the output biases; null for none"
    )
    strides: tuple[tuple[Literal[1, 2], ...], ...] | None = Field(
        None, description="per level, 2 for each axis halved on the way there; null halves every axis every time"
    )

    input_channels: PositiveInt = Field(
        1, description="channels of the images; follows from the experiment's 'channels', and need not be given"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_convention(cls, content: Any) -> Any:
        """Accept the older name of the activation: `convention`, exclusive or independent."""
        if not isinstance(content, dict) or "convention" not in content or "activation" in content:
            return content
        written: dict[str, str] = {word: activation for activation, word in CONVENTIONS.items()}
        convention = content["convention"]
        others = {key: value for key, value in content.items() if key != "convention"}
        return {**others, "activation": written.get(str(convention), convention)}

    @model_serializer(mode="wrap")
    def _write_convention(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write the older name, and one channel not at all: fingerprints of older experiments stay as they are."""
        renamed = {"activation": "convention"}
        content = {renamed.get(key, key): value for key, value in write(self).items()}
        if content.get("input_channels") == 1:
            del content["input_channels"]
        return {**content, "convention": CONVENTIONS[self.activation]} if "convention" in content else content

    @model_validator(mode="after")
    def _strides_fit(self) -> UNetSettings:
        if self.strides is None:
            return self
        if len(self.strides) != len(self.features):
            raise SettingError(
                f"strides has {len(self.strides)} levels and features {len(self.features)}: give one entry per level",
                code="strides-per-level",
            )
        if any(len(level) != self.dimensions for level in self.strides):
            raise SettingError(
                f"every entry of strides needs {self.dimensions} numbers, one per axis of the network",
                code="strides-per-axis",
            )
        if set(self.strides[0]) != {1}:
            raise SettingError(
                "the first entry of strides must be all 1: the first level works on the image as it is",
                code="strides-begin-with-one",
            )
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> UNetSettings:
        if self.norm == "group" and any(n % self.groups for n in self.features):
            raise SettingError(
                f"group normalisation needs features that are multiples of {self.groups} (network.groups)",
                code="features-per-group",
            )
        return self

    @property
    def level_strides(self) -> tuple[tuple[int, ...], ...]:
        """Stride per level and axis."""
        if self.strides is not None:
            return self.strides
        return ((1,) * self.dimensions, *((2,) * self.dimensions for _ in self.features[1:]))

    @property
    def level_kernels(self) -> tuple[tuple[int, ...], ...]:
        """Kernel size per level and axis: 3, but 1 along an axis that is still too coarse to mix.

        That is an axis never halved so far which the next level keeps while it halves another one: voxels are longer
        along it than along the others, as in thick slices. Once the others have caught up, kernels cover all axes.
        """
        strides = self.level_strides

        def kernel(level: int, axis: int) -> int:
            following = strides[level + 1] if level + 1 < len(strides) else None
            untouched = all(stride[axis] == 1 for stride in strides[: level + 2])
            return 1 if following and untouched and 2 in following else 3

        return tuple(tuple(kernel(level, axis) for axis in range(self.dimensions)) for level in range(len(strides)))

    @property
    def divisor(self) -> tuple[int, ...]:
        """Sizes along each axis must be a multiple of this."""
        return tuple(math.prod(along) for along in zip(*self.level_strides, strict=True))
