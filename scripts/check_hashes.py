"""Hold what pip has installed against the hashes of a requirements file.

    pip install --report report.json torch==2.13.0 && python scripts/check_hashes.py report.json requirements-torch.txt

For packages of which pip must choose the build, which `--require-hashes` does not allow for. A package of the file that
pip found installed already is not in its report, and is not checked again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def strangers(report: Mapping[str, Any], requirements: str) -> list[str]:
    """Installed files of the requirements' packages that have none of their hashes."""
    allowed: dict[str, set[str]] = {}
    for line in requirements.replace("\\\n", " ").splitlines():
        if pin := re.match(r"([A-Za-z0-9._-]+)==", line):
            allowed[_normalised(pin[1])] = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))
    found = []
    for item in report["install"]:
        name, info = _normalised(item["metadata"]["name"]), item["download_info"]
        if name in allowed and info.get("archive_info", {}).get("hashes", {}).get("sha256") not in allowed[name]:
            found.append(str(info["url"]))
    return found


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    report, requirements = (Path(argument) for argument in sys.argv[1:3])
    if bad := strangers(json.loads(report.read_text()), requirements.read_text()):
        sys.exit(f"these files have none of the hashes of {requirements}: {', '.join(bad)}")
