"""Checks of a participant's machine: clock, disk, GPU, free port."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from panorgan.config import HardwareSettings
from panorgan.deployment.check import Check
from panorgan.deployment.control import read_json
from panorgan.errors import ConfigError
from panorgan.federation.certificates import Credentials, begins, day, read_certificate
from panorgan.federation.engine import CLOCK_OFF_SECONDS

_GB = 1e9
_CLOCK_UNSYNCHRONISED = 5  # TIME_ERROR in timex.h


def check_clock(credentials: Credentials, now: float | None = None, seen: Path | None = None) -> Check:
    """Check the clock: against the certificates, against the server's at the last connection, and for NTP.

    TLS does not carry the server's time; a site notes the difference when it is connected (`seen`; None at the server).
    """
    now = time.time() if now is None else now
    try:
        passed = max(begins(read_certificate(path)) for path in (credentials.certificate, credentials.root))
    except ConfigError:
        return Check("clock", "skipped", "the certificates to compare it with cannot be read")
    if now < passed:
        what = f"It is behind: the date here is {day(now)}, and the kit was made on {day(passed)}."
        return Check("clock", "failed", what, "Set this machine's clock, and synchronise it by NTP.", "clock-behind")
    compared, off = _compare_clocks(seen)
    if off:
        fix = "Set this machine's clock, or ask the coordinator to check theirs."
        return Check("clock", "warning", compared, fix, "clock-off")
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    synchronised = _is_synchronised()
    if synchronised is False:
        what = f"{shown}. According to the system it is not synchronised{compared}."
        fix = "Switch NTP on, for example with 'timedatectl set-ntp true'."
        return Check("clock", "warning", what, fix, "clock-unsynchronised")
    keeps = "synchronised by NTP" if synchronised else "whether it is synchronised by NTP is not known here"
    return Check("clock", "ok", f"{shown}, not before the kit was made; {keeps}")


def _compare_clocks(seen: Path | None) -> tuple[str, bool]:
    """The difference from the server's clock at the last connection, and whether it was large."""
    if seen is None:
        return "", False  # the server itself
    noted = read_json(seen)
    if "server_ahead" not in noted:
        return "; it was not compared with the server's", False
    ahead, at = float(noted["server_ahead"]), day(float(noted.get("time", 0.0)))
    if abs(ahead) <= CLOCK_OFF_SECONDS:
        return f"; it agreed with the server's on {at}", False
    return f"It was {abs(ahead):.0f} s {'behind' if ahead > 0 else 'ahead of'} the server's on {at}.", True


def _is_synchronised() -> bool | None:
    """Whether the kernel's clock is synchronised; None where that is unknown (only Linux tells, some containers do
    not)."""
    try:
        ask = ctypes.CDLL(None).adjtimex
    except (OSError, TypeError, AttributeError):
        return None
    # All zero means: change nothing, only report. The structure is about 200 bytes; the rest is spare.
    state = int(ask(ctypes.create_string_buffer(1024)))
    return None if state < 0 else state != _CLOCK_UNSYNCHRONISED


def check_folder(name: str, folder: Path, need_gb: float) -> Check:
    """Check that a folder, which need not exist yet, is writable and has enough space. Leaves nothing behind."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"room")
            file.flush()
        free = shutil.disk_usage(place).free / _GB
    except OSError as error:
        fix = f"Let the user that runs panorgan write there, or choose another folder for '{name}'."
        what = f"{place} cannot be written: {error.strerror}."
        return Check(f"disk: {name}", "failed", what, fix, "not-writable")
    if free < need_gb:
        fix = "Make room, or choose a folder on another disk."
        what = f"{free:.1f} GB free at {place}; {need_gb:g} GB are required."
        return Check(f"disk: {name}", "failed", what, fix, "too-little-disk")
    return Check(f"disk: {name}", "ok", f"{free:.1f} GB free at {place}")


def check_device(hardware: HardwareSettings, need_gb: float) -> Check:
    """Check that the configured device is available, with enough free memory."""
    import torch

    name = "device"
    if hardware.device == "cpu":
        if need_gb > 0:
            what = f"hardware.device is cpu, but min_gpu_memory_gb requires {need_gb:g} GB on a GPU."
            fix = "Set hardware.device to auto, or min_gpu_memory_gb to 0."
            return Check(name, "failed", what, fix, "cpu-with-gpu-memory")
        return Check(name, "ok", f"cpu, {_cpu_use(hardware)}")
    if not torch.cuda.is_available():
        if hardware.device == "cuda" or need_gb > 0:
            fix = "Check the driver with nvidia-smi, and that torch was installed with CUDA; or use device: cpu."
            return Check(name, "failed", "No GPU was found, but site.yaml requires one.", fix, "no-gpu")
        what = f"No GPU was found: the site trains on {_cpu_use(hardware)}, which is slow for real scans."
        fix = "Check the driver with nvidia-smi, or set hardware.device to cpu."
        return Check(name, "warning", what, fix, "no-gpu")
    free, total = (amount / _GB for amount in torch.cuda.mem_get_info())
    card = f"{torch.cuda.get_device_name()}, {free:.1f} of {total:.1f} GB free"
    if free < need_gb:
        use = "End other processes on it (nvidia-smi)" if total >= need_gb else "Use a larger GPU"
        fix = f"{use}, or lower min_gpu_memory_gb if the experiment needs less."
        return Check(name, "failed", f"{card}; {need_gb:g} GB are required.", fix, "too-little-gpu-memory")
    return Check(name, "ok", card)


def _cpu_use(hardware: HardwareSettings) -> str:
    if hardware.threads is None:
        return f"{os.cpu_count()} CPU cores"
    return f"{hardware.threads} CPU thread{'s' if hardware.threads > 1 else ''}"


def check_port(host: str, port: int, running: bool) -> Check:
    """Check that the server can listen there. `running`: it does already."""
    name = f"port {port}"
    if running:
        return Check(name, "ok", "in use by the running server of this kit")
    place = "127.0.0.1" if host in ("localhost", "127.0.0.1", "::1") else ""
    try:
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as trial:
            # As servers do: a connection that has just ended does not count.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((place, port))
    except PermissionError:
        fix = "Use a port above 1023 in federation.yaml."
        return Check(name, "failed", "This user may not listen there.", fix, "port-forbidden")
    except OSError as error:
        fix = f"Find the process ('ss -ltnp | grep :{port}'), and end it; or make kits with another port."
        return Check(name, "failed", f"It is in use: {error.strerror}.", fix, "port-taken")
    return Check(name, "ok", "free")
