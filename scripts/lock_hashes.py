"""Write the hashes of all pinned packages into the requirements files, from a package index.

    python scripts/lock_hashes.py [--index https://pypi.org/simple] [--also FOLDER]

Run it after a version in a requirements file has changed. `pip install --require-hashes` then installs these very files
or nothing. Hashes of all wheels that suit a supported Python and platform are written (a source distribution only where
there is no wheel, because building one runs its code). `--also` adds wheels of a folder under the same versions, such
as PyTorch's CPU build, which is not on PyPI.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import re
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = (
    "requirements.txt",
    "requirements-torch.txt",
    "requirements-network.txt",
    "requirements-dicom.txt",
    "requirements-mlflow.txt",
    "requirements-onnx.txt",
    "requirements-dev.txt",
    "requirements-docs.txt",
)
_LINK = re.compile(r'<a\s[^>]*href="([^"#]+)#sha256=([0-9a-f]{64})"', re.IGNORECASE)
_PYTHONS = re.compile(r"-(?:[a-z0-9.]*\bpy3|py2\.py3|cp31[1-4]-cp31[1-4]-|cp3\d+-abi3)")
_PLATFORMS = re.compile(
    r"-any\.whl$|manylinux[0-9a-z_.]*_(x86_64|aarch64)\.whl$|macosx_[0-9a-z_]+\.whl$|win_(amd64|arm64)\.whl$"
)
_SOURCE = (".tar.gz", ".zip")


def main() -> int:
    """Rewrite the files in place."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--index", default="https://pypi.org/simple")
    options.add_argument("--also", type=Path, help="folder with wheels that the index does not have")
    chosen = options.parse_args()
    for name in FILES:
        path = ROOT / name
        path.write_text(locked(path.read_text(), chosen.index, chosen.also))
    return 0


def locked(text: str, index: str, also: Path | None) -> str:
    """A requirements file with the hashes of its packages; comments stay."""
    lines = []
    for line in text.replace("\\\n", " ").splitlines():
        pin = re.match(r"([A-Za-z0-9._-]+)==([^\s;\\]+)", line)
        if pin is None:
            lines.append(line.rstrip())
            continue
        hashes = sorted({*from_index(index, *pin.groups()), *from_folder(also, *pin.groups())})
        if not hashes:
            raise SystemExit(f"the index has no file of {pin[0]}")
        lines.append(" \\\n".join([pin[0], *(f"    --hash=sha256:{one}" for one in hashes)]))
    return "\n".join(lines) + "\n"


def from_index(index: str, name: str, version: str) -> set[str]:
    """Hashes of the files of a version that we may install."""
    address = f"{index.rstrip('/')}/{normalised(name)}/"
    with urllib.request.urlopen(address, timeout=60) as answer:
        page = answer.read().decode()
    found = {
        urllib.request.url2pathname(html.unescape(link)).rsplit("/", 1)[-1]: one for link, one in _LINK.findall(page)
    }
    mine = {file: one for file, one in found.items() if version_of(file, name) == version}
    wheels = {one for file, one in mine.items() if suits(file)}
    return wheels or {one for file, one in mine.items() if file.endswith(_SOURCE)}


def from_folder(folder: Path | None, name: str, version: str) -> set[str]:
    """Hashes of wheels in a folder; a local version (`2.13.0+cpu`) satisfies the same pin."""
    wheels = folder.glob("*.whl") if folder else ()
    mine = [path for path in wheels if version_of(path.name, name).partition("+")[0] == version]
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in mine}


def suits(file: str) -> bool:
    """Whether a wheel is for a Python and a platform that we support."""
    return bool(_PYTHONS.search(file) and _PLATFORMS.search(file))


def version_of(file: str, name: str) -> str:
    """The version in a file's name; empty where it belongs to another package."""
    stem = re.sub(r"(\.tar\.gz|\.zip)$", "", file)
    head = re.match(r"(?P<name>.+?)-(?P<version>\d[^-]*)", stem)
    return head["version"] if head and normalised(head["name"]) == normalised(name) else ""


def normalised(name: str) -> str:
    """As indexes write names."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
