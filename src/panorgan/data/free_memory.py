"""The memory that this process may still use."""

from __future__ import annotations

from pathlib import Path


def free_memory(proc: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Bytes that may be used, also by the limit of a container; None where the system does not report it."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in proc.read_text().splitlines() if ":" in line)
        found.append(float(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        most, used = (float((group / name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(max(most - used, 0.0))
    except (OSError, ValueError):  # no limit is written as "max"
        pass
    return min(found, default=None)
