"""Put another version of NiiVue, the viewer's picture library, into the package.

    python scripts/vendor_niivue.py 0.69.0

Takes the bundled file from the npm package (by `npm pack`, from the registry that npm is set to), the licences of what
is bundled in it, and writes both with a record: version, hashes, parts. NiiVue's package holds no licence text: the
one in `niivue.LICENSE.txt` is that of its repository; look whether it still is the same.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

STATIC = Path(__file__).parents[1] / "src" / "panorgan" / "viewer" / "static"
NAME = "@niivue/niivue"
FILE = "niivue.umd.js"


def main() -> int:
    """Replace the vendored file and its record."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("version")
    version = options.parse_args().version
    with tempfile.TemporaryDirectory() as scratch:
        package, integrity = pack(NAME, version, Path(scratch))
        content = member(package, f"package/dist/{FILE}")
        facts = json.loads(member(package, "package/package.json"))
        parts = [part(name, facts["dependencies"], Path(scratch)) for name in bundled(package)]
    (STATIC / FILE).write_bytes(content)
    licences = [f"{one['name']} ({one['licence']})\n\n{one.pop('text').strip()}\n" for one in parts]
    (STATIC / "niivue.parts.LICENSES.txt").write_text("\n----\n\n".join(licences), encoding="utf-8")
    record = {
        "name": NAME,
        "version": facts["version"],
        "licence": facts["license"],
        "file": FILE,
        "sha256": hashlib.sha256(content).hexdigest(),
        "npm_integrity": integrity,
        "parts": parts,
    }
    (STATIC / "niivue.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def pack(name: str, version: str, scratch: Path) -> tuple[Path, str]:
    """The package's archive, and npm's hash of it."""
    command = ["npm", "pack", "--silent", "--json", "--pack-destination", str(scratch), f"{name}@{version}"]
    (answer,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    archive = next(path for path in scratch.glob("*.tgz") if path.name == Path(answer["filename"]).name)
    digest = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != answer["integrity"]:
        raise SystemExit(f"{archive} is not what npm promised")
    return archive, digest


def member(archive: Path, name: str) -> bytes:
    """One file of a package."""
    with tarfile.open(archive) as tar:
        file = tar.extractfile(name)
        assert file is not None
        return file.read()


def bundled(archive: Path) -> list[str]:
    """The packages whose code is in the bundle, by esbuild's own record of it."""
    found: set[str] = set()
    for output in json.loads(member(archive, "package/dist/metafile-esm.json"))["outputs"].values():
        for path, facts in output["inputs"].items():
            if facts["bytesInOutput"]:
                found.update(re.findall(r"node_modules/((?:@[^/]+/)?[^/]+)/", path)[-1:])
    return sorted(found)


def part(name: str, wanted: dict[str, str], scratch: Path) -> dict[str, str]:
    """Name, licence and its text, of the newest version that NiiVue allows: the bundle does not say which it holds."""
    archive, _ = pack(name, wanted.get(name, "latest"), scratch)
    facts = json.loads(member(archive, "package/package.json"))
    with tarfile.open(archive) as tar:
        text = next(n for n in tar.getnames() if re.fullmatch(r"package/licen[cs]e(\.(md|txt))?", n, re.IGNORECASE))
    licence = member(archive, text).decode()
    return {"name": name, "licence": facts["license"], "text": licence}


if __name__ == "__main__":
    raise SystemExit(main())
