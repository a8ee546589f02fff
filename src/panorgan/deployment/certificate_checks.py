"""Checks a kit's certificates: issuer, subject, validity, and whether the private key matches."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from panorgan.deployment.check import Check
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.errors import ConfigError
from panorgan.federation.certificates import (
    ROOT,
    Credentials,
    begins,
    common_name,
    day,
    ends,
    issuer_name,
    read_certificate,
)

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

DAYS_LEFT_TO_WARN = 14
_DAY = 24 * 3600.0


def start_warnings(kit: ServerKit | SiteKit) -> list[str]:
    """Warn about a certificate that expires soon, has expired, or is not valid yet by this machine's clock.

    A server or a site reports this when it starts; otherwise it would wait forever in silence.
    """
    own = Credentials.of_site(kit.startup) if isinstance(kit, SiteKit) else Credentials.of_server(kit.startup)
    check = check_dates(own)
    return [f"{check.name}: {check.what} {check.fix}"] if check.verdict in ("warning", "failed") else []


def check_credentials(credentials: Credentials, name: str, now: float | None = None, prefix: str = "") -> list[Check]:
    """Check that it is signed by the federation's root, for `name`, valid for a while, and matches the private key.

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


def _check_identity(title: str, own: Certificate, root: Certificate, name: str) -> Check:
    from cryptography.exceptions import InvalidSignature

    ask = "Ask the coordinator for this site's own kit, and use its startup folder unchanged."
    try:
        own.verify_directly_issued_by(root)
    except (InvalidSignature, ValueError, TypeError):
        signer = issuer_name(own)
        what = f"It is not signed by this federation's {ROOT}, but by {signer!r}."
        return Check(title, "failed", what, ask, "certificate-foreign")
    if not name:
        return Check(title, "skipped", f"for {common_name(own)}; the name of this participant is not known yet")
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
        what = f"{path.name} does not match the certificate next to it."
        return Check(title, "failed", what, again, "key-mismatch")
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        who = "Every user of this machine" if mode & 0o007 else "The group of the file"
        what = f"{who} may open {path.name} (mode {mode:o})."
        return Check(title, "failed", what, f"chmod 600 {path}", "key-exposed")
    return Check(title, "ok", "matches the certificate; only its owner may read it")
