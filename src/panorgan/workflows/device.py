"""The device of this machine."""

from __future__ import annotations

import torch

from panorgan.config import HardwareSettings
from panorgan.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")


def choose_device(name: str, where: str) -> torch.device:
    """The device of that name, `auto` for the best available; `where` names the setting in an error."""
    torch.set_flush_denormal(True)  # tiny activations otherwise slow a CPU down many times
    if name not in DEVICES:
        raise ConfigError(
            f"There is no device called {name!r}.", code="unknown-device", where=where, fix=f"Use {', '.join(DEVICES)}."
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("No CUDA device was found.", code="no-cuda", where=where, fix="Use auto or cpu.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def use_hardware(hardware: HardwareSettings) -> torch.device:
    """The configured device, with its threads and its setting for reproducible bits."""
    if hardware.threads:
        torch.set_num_threads(hardware.threads)
    device = choose_device(hardware.device, "hardware.device")
    if device.type == "cuda":
        torch.backends.cudnn.deterministic = hardware.deterministic
        torch.backends.cudnn.benchmark = not hardware.deterministic
    return device
