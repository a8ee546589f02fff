"""New certificates for existing kits, from the federation's authority. Everything else in a kit stays.

Every renewal makes a new private key as well: a key that was copied unnoticed is of use no longer than its
certificate, and after a revocation the old key must not come back.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from panorgan.agreement import Agreement
from panorgan.deployment.kits import SERVER, sign_again
from panorgan.deployment.settings import FederationSettings
from panorgan.errors import ConfigError, did_you_mean
from panorgan.federation.certificates import Credentials, day, ends, read_certificate
from panorgan.federation.files import write_atomically

RENEWED = "renewed"
"""Folder for kits that are no longer here: only the files to copy over those of the kit."""


@dataclass(frozen=True)
class Renewal:
    """`here`: the kit itself was renewed. Else `folder` holds a `startup` to copy over that of the kit."""

    name: str
    folder: Path
    here: bool
    expires: str


def renew_kits(
    settings: FederationSettings, experiment: Agreement, folder: Path, names: Sequence[str] = ()
) -> list[Renewal]:
    """Renew the named participants (`server` or sites), or all of them."""
    known = [SERVER, *settings.sites]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"There is no participant {name!r}.",
                code="unknown-participant",
                where="the names to renew",
                why=did_you_mean(name, known) or f"there are {', '.join(known)}",
                fix="Give 'server' or a site of federation.yaml.",
            )
    wanted = [name for name in known if not names or name in names]
    with sign_again(settings, experiment, folder, [name for name in wanted if name != SERVER]) as made:
        return [_renew(name, folder, _sources(name, made.server, made.admin, made.sites)) for name in wanted]


def _sources(name: str, server: Path, admin: Path, sites: Mapping[str, Path]) -> dict[str, Path]:
    """Startup folders with new files, by their place in the kit."""
    return (
        {"startup": server / "startup", "admin/startup": admin / "startup"}
        if name == SERVER
        else {"startup": sites[name] / "startup"}
    )


def _renew(name: str, folder: Path, sources: Mapping[str, Path]) -> Renewal:
    kit = folder / SERVER if name == SERVER else folder / "sites" / name
    here = (kit / "startup").is_dir()
    target = kit if here else folder / RENEWED / name
    before = _expires(name, kit) if here else ""
    for place, source in sources.items():
        for file in _credentials(source):
            _put(file, target / place / file.name)
    expires = _expires(name, target)
    if here and (readme := kit / "README.md").is_file():
        write_atomically(readme, readme.read_text(encoding="utf-8").replace(before, expires))
    return Renewal(name, target, here, expires)


def _credentials(startup: Path) -> list[Path]:
    """Key first: after an interruption in between, preflight says that the two do not fit; renew again."""
    return [*startup.glob("*.key"), *startup.glob("*.crt"), *startup.glob("rootCA.pem")]


def _put(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.parent.chmod(0o700)
    scratch = target.with_name(f".{target.name}.incomplete")
    scratch.touch(mode=0o600)
    shutil.copyfile(source, scratch)
    scratch.chmod(0o600)
    scratch.replace(target)


def _expires(name: str, kit: Path) -> str:
    startup = kit / "startup"
    own = Credentials.of_server(startup) if name == SERVER else Credentials.of_site(startup)
    return day(ends(read_certificate(own.certificate)))
