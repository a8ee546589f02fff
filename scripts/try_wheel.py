"""Install the built wheel into an environment that has only what the wheel asks for, and run a tiny demo from it.

    python scripts/try_wheel.py build/dist

A full install would take minutes, so the wheel's dependencies are not downloaded: the distributions that it names, and
those that they name, are linked from the environment that runs this script. Nothing else of that environment, and
nothing of the repository, is on the path. A dependency that pyproject.toml forgets is therefore missed here, too.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SOURCE = Path(__file__).parents[1] / "src" / "panorgan"
DEMO = """
name: tiny
vocabulary: [liver, spleen]
phantom:
  field_of_view_mm: [364, 320, 220]
  sites:
    - {name: north, annotated: [liver], cases: 4, spacing_mm: [12, 12, 12]}
    - {name: south, annotated: [spleen], cases: 4, spacing_mm: [12, 12, 12]}
plan: {spacing_mm: [12, 12, 12], window_hu: [-160, 240]}
network: {features: [4, 8, 8]}
training:
  rounds: 1
  local_steps: 1
  validate_every: 1
  overlap: 0.0
  sampling: {patch_size: [16, 16, 16], batch_size: 1}
"""


def needed(wheel: Path) -> set[str]:
    """The distributions that the wheel needs without extras, and all that these need, as they are installed here."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        own = metadata.PathDistribution(zipfile.Path(packed, name.removesuffix("METADATA")))
        waiting = list(_asked(own.requires or (), set()))
    found: dict[str, set[str]] = {}
    while waiting:
        name, extras = waiting.pop()
        if name in found and extras <= found[name]:
            continue
        found[name] = found.get(name, set()) | extras
        waiting += _asked(metadata.requires(name) or (), found[name])
    return set(found)


def _asked(lines: Iterator[str] | list[str] | tuple[str, ...], extras: set[str]) -> Iterator[tuple[str, set[str]]]:
    for line in lines:
        wanted = Requirement(line)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            installed = metadata.version(wanted.name)
            if not wanted.specifier.contains(installed.partition("+")[0], prereleases=True):
                sys.exit(f"{line} is asked for, {installed} is installed")
            yield canonicalize_name(wanted.name), set(wanted.extras)


def link(names: set[str], target: Path) -> None:
    """Link what the distributions installed into another environment's packages."""
    for name in sorted(names):
        distribution = metadata.distribution(name)
        home = Path(str(distribution.locate_file("")))
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            place = target / top
            if not place.exists() and (home / top).exists():
                place.symlink_to(home / top)


def check_content(dist: Path) -> Path:
    """The wheel, after a look at what wheel and sdist hold: every file of the package, and what builds it."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    ours = {path.relative_to(SOURCE.parent).as_posix() for path in SOURCE.rglob("*") if _belongs(path)}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("panorgan/")}
    with tarfile.open(sdist) as tape:
        inside = {name.partition("/")[2] for name in tape.getnames()}
    missing = [f"{wheel.name}: {name}" for name in sorted(ours ^ packed)]
    missing += [f"{sdist.name}: src/{name}" for name in sorted(ours) if f"src/{name}" not in inside]
    missing += [f"{sdist.name}: {name}" for name in ("pyproject.toml", "LICENSE", "README.md") if name not in inside]
    if missing:
        sys.exit("\n".join(["The files of package and repository differ:", *missing]))
    return wheel


def _belongs(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def main(dist: Path) -> None:
    """Check, install, run."""
    wheel = check_content(dist).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
        python = place / "venv" / "bin" / "python"
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
        subprocess.run([*install, "--disable-pip-version-check", wheel], check=True)
        packages = next((place / "venv" / "lib").glob("python*/site-packages"))
        link(needed(wheel), packages)
        (place / "tiny.yaml").write_text(DEMO)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        clean |= {"PANORGAN_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"}
        command = [str(place / "venv" / "bin" / "panorgan"), "train", "tiny.yaml", "--run", "run", "--json"]
        subprocess.run(command, check=True, cwd=place, env=clean, stdout=subprocess.DEVNULL)
        home = [str(python), "-c", "import panorgan; print(panorgan.__file__)"]
        from_wheel = subprocess.run(home, check=True, cwd=place, env=clean, capture_output=True, text=True).stdout
        assert from_wheel.startswith(str(packages)), from_wheel
        assert (place / "run" / "report.html").stat().st_size > 10_000
    print(f"{wheel.name} runs in an environment of its own")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
