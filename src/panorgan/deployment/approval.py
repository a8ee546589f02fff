"""The approval of a kit by its hospital: every file that decides what its site does, and no other.

A kit comes from the coordinator. The hospital reads it, edits `site.yaml` and `egress.yaml`, and approves: the engine's
own policies are replaced by those of *this* installation, every file in `local/` and `startup/` is recorded with its
SHA-256, and both folders become read-only. From then on a site starts, and answers, only while they are unchanged.

The record lies in `local/` too. A program that runs as the owner of the kit could change both; the read-only mounts of
the systemd unit and the Compose file, or another owner, prevent that (docs/deploy.md).
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import all_suffixes
from pathlib import Path

from panorgan.deployment.engine import network_engine
from panorgan.deployment.folders import Kit, SiteKit
from panorgan.errors import ConfigError
from panorgan.federation.engine import SiteFiles
from panorgan.federation.failures import NotApprovedError
from panorgan.federation.files import write_atomically

RECORD = "approved.json"
OWN = ("local/site.yaml", "local/egress.yaml", "local/experiment.yaml")
"""What the hospital reads and edits. The rest of both folders is the engine's."""
_EDITORS = ("*~", ".*.sw?", ".#*", "#*#", "*.bak", ".DS_Store")
"""What editors leave behind. The engine reads no file of such a name."""
_WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class Deviations:
    """How a kit differs from its approval; paths are relative to the kit. `modules` could be mistaken for code."""

    never_approved: bool = False
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self != Deviations()

    def words(self) -> str:
        """One sentence, for people."""
        if self.never_approved:
            return "it was never approved"
        lists = (("changed", self.changed), ("gone", self.missing), ("new", self.added), ("code", self.modules))
        return "; ".join(f"{word}: {', '.join(names)}" for word, names in lists if names)

    def of_the_engine(self) -> tuple[str, ...]:
        """Those that could change what the engine runs before panorgan can check."""
        return tuple(name for name in (*self.changed, *self.missing, *self.added) if name not in OWN)


def approve(kit: SiteKit) -> Deviations:
    """Approve the kit as it is now; returns how it differed from the approval before.

    The engine's policies become those of this installation. Raises an error for files that do not belong in a kit.
    """
    files = network_engine().site_files()
    _refuse_stray_files(kit, files)
    network_engine().check_kit(kit.path, "site")
    before = deviations(kit)
    reopen(kit)
    for name in files.obsolete:
        (kit.path / name).unlink(missing_ok=True)
    for name, text in files.policies.items():
        write_atomically(kit.path / name, text)
    record(kit)
    for path in _everything(kit):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_WRITE)
    return before


def record(kit: SiteKit) -> None:
    """Record every file in `local/` and `startup/`."""
    content = {
        "format": 1,
        "approved": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "by": _who(),
        "files": _hashes(kit),
    }
    write_atomically(kit.local / RECORD, json.dumps(content, indent=1) + "\n", durable=True)


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container the user may have a number without a name
        return f"user {os.getuid()}"


def reopen(kit: SiteKit) -> None:
    """Let the owner write to both folders again, to edit or to delete them."""
    for path in _everything(kit):
        path.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IWUSR)


def deviations(kit: SiteKit) -> Deviations:
    """How the kit differs from its approval; false if it does not."""
    modules = tuple(modules_in(kit))
    try:
        approved = json.loads((kit.local / RECORD).read_text(encoding="utf-8"))["files"]
        noted = {str(name): str(digest) for name, digest in approved.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return Deviations(never_approved=True, modules=modules)
    now = _hashes(kit)
    return Deviations(
        changed=tuple(sorted(name for name in now.keys() & noted.keys() if now[name] != noted[name])),
        missing=tuple(sorted(noted.keys() - now.keys())),
        added=tuple(sorted(now.keys() - noted.keys())),
        modules=modules,
    )


def require_approved(kit: SiteKit) -> None:
    """Raise an error if the kit differs from its approval."""
    if found := deviations(kit):
        raise NotApprovedError(
            "This kit differs from what was approved.",
            where=str(kit.path),
            why=found.words(),
            fix=how_to_approve(kit, found),
        )


def how_to_approve(kit: SiteKit, found: Deviations) -> str:
    """The fix for deviations."""
    approving = f"panorgan federation approve {kit.path}"
    if found.modules:
        return f"Find out how {', '.join(found.modules)} got there, and move it out of the kit."
    if found.never_approved:
        return f"Read local/site.yaml and local/egress.yaml, then: {approving}"
    return f"If you want it so: {approving}. If not, put the files back and find out who changed them."


def modules_in(kit: Kit) -> Iterator[str]:
    """Python modules in the kit's own folder. Nothing imports from there; an attacker may have tried."""
    endings = (*all_suffixes(), ".pth")
    for path in sorted(kit.path.iterdir()) if kit.path.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            if any((path / f"__init__{ending}").exists() for ending in endings):
                yield f"{path.name}/"
        elif path.name.endswith(endings):
            yield path.name


def _refuse_stray_files(kit: SiteKit, files: SiteFiles) -> None:
    """What the engine would read without a word: extra settings of its own, folders of code, components."""
    known = {*OWN, *files.policies, *files.provisioned, *files.obsolete}
    stray = [*sorted(_hashes(kit).keys() - known), *modules_in(kit)]
    if stray:
        raise ConfigError(
            f"The kit holds what does not belong there: {', '.join(stray)}.",
            code="stray-files",
            where=str(kit.path),
            why="the network engine could load it as settings or code",
            fix="Move it out of the kit; if it came with the kit, ask the coordinator why.",
        )


def _hashes(kit: SiteKit) -> dict[str, str]:
    """SHA-256 of every file in both folders; anything that is not a plain file is recorded as such."""
    return {
        path.relative_to(kit.path).as_posix(): _hash(path)
        for path in _everything(kit)
        if path not in (kit.local, kit.startup, kit.local / RECORD) and not _is_temporary(path)
    }


def _is_temporary(path: Path) -> bool:
    """Whether a file is temporary: an editor's, or one that a killed `approve` did not finish."""
    return any(path.match(pattern) for pattern in (*_EDITORS, ".*.incomplete")) and not path.is_dir()


def _hash(path: Path) -> str:
    if path.is_symlink() or not path.is_file():
        return f"not a file: {os.readlink(path) if path.is_symlink() else 'folder'}"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _everything(kit: SiteKit) -> list[Path]:
    """Both folders and all that is in them; links are not followed."""
    found = []
    for folder in (kit.local, kit.startup):
        if folder.is_dir():
            found += [folder, *folder.rglob("*")]
    return found
