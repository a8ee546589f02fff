"""The installed versions. Participants compare theirs: other versions may compute other bits, or be incompatible."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import panorgan
from panorgan.deployment.check import Check
from panorgan.deployment.engine import network_engine

_PACKAGES = ("torch", "monai")


def versions_here() -> dict[str, str]:
    """Versions of the packages that affect numbers and connection; packages that are not installed are left out."""
    found = {"panorgan": panorgan.__version__, "python": platform.python_version()}
    for package in (*_PACKAGES, network_engine().package):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def check_versions(agreed: Mapping[str, str]) -> list[Check]:
    """Compare with the machine that made the kit; the first two numbers count (2.9.0 matches 2.9.4)."""
    here = versions_here()
    if network_engine().package not in here:
        fix = "Install panorgan's wheel with its extra: pip install './panorgan-VERSION-py3-none-any.whl[network]'"
        what = f"The network engine ({network_engine().package}) is not installed here."
        return [Check("versions", "failed", what, fix, "nvflare-missing")]
    if not agreed:
        shown = ", ".join(f"{name} {number}" for name, number in here.items())
        return [Check("versions", "ok", f"{shown}. The kit does not say which versions the others use.")]
    others = [name for name, number in agreed.items() if _minor(here.get(name, "")) != _minor(number)]
    if not others:
        return [Check("versions", "ok", ", ".join(f"{name} {here[name]}" for name in agreed))]
    words = ", ".join(f"{name} {here.get(name, 'missing')} instead of {agreed[name]}" for name in others)
    return [
        Check(
            "versions",
            "warning",
            f"Other versions than where the kit was made: {words}. Results may differ in the last digits, or more.",
            "Install the same versions if you can: "
            + " ".join(f"{name}=={agreed[name]}" for name in others)
            + ", or agree with the coordinator on these.",
            "other-versions",
        )
    ]


def _minor(number: str) -> str:
    return ".".join(number.split("+")[0].split(".")[:2])
