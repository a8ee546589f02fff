"""Checks of a kit's certificates: who signed them, for whom, until when, and whether the private key matches."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from panorgan.deployment.check import Check
from panorgan.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

ROOT = "rootCA.pem"
DAYS_LEFT_TO_WARN = 14
_DAY = 24 * 3600.0


@dataclass(frozen=True)
class Credentials:
    """A participant's certificate, its private key, and the root certificate of its peers."""

    certificate: Path
    key: Path
    root: Path

    @classmethod
    def of_site(cls, startup: Path) -> Credentials:
        """Those of a site, or of the coordinator as a person."""
        return cls(startup / "client.crt", startup / "client.key", startup / ROOT)

    @classmethod
    def of_server(cls, startup: Path) -> Credentials:
        """Those of the server."""
        return cls(startup / "server.crt", startup / "server.key", startup / ROOT)


def check_credentials(credentials: Credentials, name: str, now: float | None = None, prefix: str = "") -> list[Check]:
    """Signed by the federation's root, for this `name`, valid now and for a while, with a matching private key.

    `prefix` goes in front of the names of the checks, where a kit has more than one certificate.
    """
    titles = [f"{prefix}certificate", f"{prefix}certificate dates", f"{prefix}private key"]
    try:
        root, own = read_certificate(credentials.root), read_certificate(credentials.certificate)
    except ConfigError as error:
        why = error.why or error.where
        return [
            Check(titles[0], "failed", f"{error.what} ({why})", error.fix, error.code),
            *(Check(title, "skipped", "the certificate could not be read") for title in titles[1:]),
        ]
    return [
        _check_identity(titles[0], own, root, name),
        _check_dates(titles[1], own, root, time.time() if now is None else now),
        _check_key(titles[2], own, credentials.key),
    ]


def check_dates(credentials: Credentials, now: float | None = None) -> Check:
    """The dates only; skipped where the certificate cannot be read."""
    title = "certificate dates"
    try:
        root, own = read_certificate(credentials.root), read_certificate(credentials.certificate)
    except ConfigError:
        return Check(title, "skipped", "the certificate could not be read")
    return _check_dates(title, own, root, time.time() if now is None else now)


def read_certificate(path: Path) -> Certificate:
    """Read a PEM file."""
    try:
        from cryptography import x509
    except ImportError as error:
        raise ConfigError(
            "Certificates cannot be read.",
            code="cryptography-missing",
            where=str(path),
            why="the package 'cryptography' is not installed",
            fix="pip install 'panorgan[network]'",
        ) from error
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is not a certificate"
        raise ConfigError(
            f"{path.name} cannot be read.",
            code="certificate-unreadable",
            where=str(path),
            why=f"{path}: {why}",
            fix="Copy the startup folder from the kit again, unchanged.",
        ) from error


def common_name(certificate: Certificate) -> str:
    """The subject of a certificate."""
    return name_of(certificate.subject.rfc4514_string())


def issuer_name(certificate: Certificate) -> str:
    """The issuer that a certificate names."""
    return name_of(certificate.issuer.rfc4514_string())


def name_of(distinguished: str) -> str:
    """`CN=north,O=clinic` → `north`; the whole where there is no common name."""
    parts = dict(part.partition("=")[::2] for part in distinguished.split(","))
    return parts.get("CN", distinguished)


def begins(certificate: Certificate) -> float:
    """First moment of validity, in seconds since 1970."""
    return certificate.not_valid_before_utc.timestamp()


def ends(certificate: Certificate) -> float:
    """Last moment of validity, in seconds since 1970."""
    return certificate.not_valid_after_utc.timestamp()


def day(moment: float) -> str:
    """`2026-11-15`, in world time as certificates count."""
    return time.strftime("%Y-%m-%d", time.gmtime(moment))


def _check_identity(title: str, own: Certificate, root: Certificate, name: str) -> Check:
    from cryptography.exceptions import InvalidSignature

    ask = "Ask the coordinator for this site's own kit, and use its startup folder unchanged."
    try:
        own.verify_directly_issued_by(root)
    except (InvalidSignature, ValueError, TypeError):
        signer = issuer_name(own)
        what = f"It is not signed by this federation's {ROOT}, but by {signer!r}."
        return Check(title, "failed", what, ask, "certificate-foreign")
    if common_name(own) != name:
        what = f"It is for {common_name(own)!r}, but this participant is {name!r}."
        return Check(title, "failed", what, ask, "wrong-participant")
    return Check(title, "ok", f"for {name}, signed by {common_name(root)}")


def _check_dates(title: str, own: Certificate, root: Certificate, now: float) -> Check:
    begin, end = max(begins(own), begins(root)), min(ends(own), ends(root))
    if now < begin:
        fix = "Set this machine's clock (it should be synchronised by NTP). If it is right, ask for a new kit."
        what = f"It is valid from {day(begin)} on, but the date here is {day(now)}."
        return Check(title, "failed", what, fix, "certificate-not-yet-valid")
    if now > end:
        fix = "Ask the coordinator to renew the kit. If the certificate is new, set this machine's clock."
        what = f"It expired on {day(end)}, and the date here is {day(now)}."
        return Check(title, "failed", what, fix, "certificate-expired")
    left = (end - now) / _DAY
    if left < DAYS_LEFT_TO_WARN:
        days = f"{int(left)} days" if left >= 2 else "a day or less"
        fix = "Renew it: 'panorgan federation renew' where the kits are made."
        return Check(title, "warning", f"It expires on {day(end)}, in {days}.", fix, "certificate-expires-soon")
    return Check(title, "ok", f"valid until {day(end)} ({int(left)} days)")


def _check_key(title: str, own: Certificate, path: Path) -> Check:
    from cryptography.hazmat.primitives import serialization

    again = "Copy the startup folder from the kit again, unchanged."
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        return Check(title, "failed", f"{path.name} cannot be read: {error.strerror}.", again, "key-unreadable")
    except (ValueError, TypeError):
        return Check(title, "failed", f"{path.name} is not a private key.", again, "not-a-key")
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*form) != own.public_key().public_bytes(*form):
        what = f"{path.name} does not match the certificate beside it."
        return Check(title, "failed", what, again, "key-mismatch")
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        who = "All users of this machine" if mode & 0o007 else "The group of the file"
        what = f"{who} may open {path.name} (mode {mode:o})."
        return Check(title, "failed", what, f"chmod 600 {path}", "key-exposed")
    return Check(title, "ok", "matches the certificate; only its owner may read it")
