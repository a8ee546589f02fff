"""Write a software bill of materials (CycloneDX 1.5, JSON) of panorgan and the packages it is tested with.

    python scripts/sbom.py build/sbom.cdx.json

Names, versions and hashes come from the requirements files, licences and dependencies from what is installed; an
environment that differs from the files is an error. The same environment gives the same bytes.
"""

from __future__ import annotations

import importlib.metadata as metadata
import json
import re
import sys
import tomllib
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# What runs at a hospital, and what only builds and tests.
FILES = {
    "requirements.txt": "required",
    "requirements-torch.txt": "required",
    "requirements-network.txt": "optional",
    "requirements-dicom.txt": "optional",
    "requirements-onnx.txt": "optional",
    "requirements-dev.txt": "excluded",
}
# Files of other projects that lie in the package itself, each with a record beside it.
VENDORED = (ROOT / "src" / "panorgan" / "viewer" / "static" / "niivue.json",)
_LONGEST_LICENCE = 100  # some packages put the whole text there


def pins() -> dict[str, tuple[str, str, list[str]]]:
    """Version, scope and hashes of every package of the requirements files, by name."""
    return {name: facts for file, scope in FILES.items() for name, facts in _pins(ROOT / file, scope).items()}


def differing() -> list[str]:
    """Packages that are installed in another version than the files say; a local build (`2.13.0+cpu`) is none."""
    return [
        f"{name} {metadata.version(name)} (the files say {version})"
        for name, (version, _, _) in sorted(pins().items())
        if metadata.version(name).partition("+")[0] != version
    ]


def bill() -> dict[str, Any]:
    """The document."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = pins()
    main = _reference("panorgan", project["version"])
    references = {name: _reference(name, version) for name, (version, _, _) in pinned.items()}
    components = [_component(name, *facts) for name, facts in sorted(pinned.items())]
    components += [_vendored(json.loads(path.read_text())) for path in VENDORED]
    runs = sorted(references[name] for name, (_, scope, _) in pinned.items() if scope != "excluded")
    graph = [{"ref": main, "dependsOn": runs}]
    graph[0]["dependsOn"] = sorted(
        [*runs, *(one["bom-ref"] for one in components if one["purl"].startswith("pkg:npm/"))]
    )
    graph += [{"ref": one["bom-ref"], "dependsOn": []} for one in components if one["purl"].startswith("pkg:npm/")]
    graph += [{"ref": references[name], "dependsOn": _needs(name, references)} for name in sorted(pinned)]
    document: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": main,
                "name": "panorgan",
                "version": project["version"],
                "licenses": [{"license": {"id": project["license"]}}],
                "purl": main,
            }
        },
        "components": components,
        "dependencies": graph,
    }
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))
    return {**document, "serialNumber": f"urn:uuid:{number}"}


def _pins(path: Path, scope: str) -> dict[str, tuple[str, str, list[str]]]:
    found = {}
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if pin := re.match(r"([A-Za-z0-9._-]+)==(\S+)", line):
            found[_normalised(pin[1])] = (pin[2], scope, re.findall(r"--hash=sha256:([0-9a-f]{64})", line))
    return found


def _component(name: str, version: str, scope: str, hashes: list[str]) -> dict[str, Any]:
    installed = metadata.metadata(name)
    reported = installed.get("License-Expression") or installed.get("License") or ""
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": _reference(name, version),
        "name": name,
        "version": version,
        "scope": scope,
        "purl": _reference(name, version),
        "properties": [{"name": "panorgan:allowed-sha256", "value": one} for one in hashes],
    }
    if reported and reported != "UNKNOWN" and len(reported) <= _LONGEST_LICENCE and "\n" not in reported:
        component["licenses"] = [{"license": {"name": reported}}]
    return component


def _vendored(record: dict[str, Any]) -> dict[str, Any]:
    """A file of another project; `components` are what its authors have bundled in it, versions unstated."""
    reference = f"pkg:npm/{record['name'].replace('@', '%40')}@{record['version']}"
    return {
        "type": "library",
        "bom-ref": reference,
        "name": record["name"],
        "version": record["version"],
        "scope": "required",
        "purl": reference,
        "hashes": [{"alg": "SHA-256", "content": record["sha256"]}],
        "licenses": [{"license": {"id": record["licence"]}}],
        "components": [
            {"type": "library", "name": part["name"], "licenses": [{"license": {"id": part["licence"]}}]}
            for part in record["parts"]
        ],
    }


def _needs(name: str, references: dict[str, str]) -> list[str]:
    """Pinned packages that one asks for, extras and conditions included: which of them apply depends on the machine."""
    asked = {_normalised(re.match(r"[A-Za-z0-9._-]+", line)[0]) for line in metadata.requires(name) or ()}
    return sorted(references[one] for one in asked if one in references and one != name)


def _reference(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    if others := differing():
        sys.exit(f"installed is {', '.join(others)}: run 'make venv'")
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(bill(), indent=1, sort_keys=True) + "\n")
