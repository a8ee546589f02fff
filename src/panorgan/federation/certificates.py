"""Reads a kit's certificates: subject, issuer and validity."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from panorgan.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

ROOT = "rootCA.pem"


@dataclass(frozen=True)
class Credentials:
    """A participant's certificate, its private key, and the root that signs every certificate of the federation."""

    certificate: Path
    key: Path
    root: Path

    @classmethod
    def of_site(cls, startup: Path) -> Credentials:
        """Of a site, or of the coordinator as a person."""
        return cls(startup / "client.crt", startup / "client.key", startup / ROOT)

    @classmethod
    def of_server(cls, startup: Path) -> Credentials:
        """Of the server."""
        return cls(startup / "server.crt", startup / "server.key", startup / ROOT)


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
            fix="Install panorgan's wheel with its extra: pip install './panorgan-VERSION-py3-none-any.whl[network]'",
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
    """The participant that a certificate names."""
    return name_of(certificate.subject.rfc4514_string())


def issuer_name(certificate: Certificate) -> str:
    """The signer that a certificate names; the signature proves it."""
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


def subject(certificate: Certificate) -> tuple[str, str]:
    """Name and organisation of the participant that a certificate names."""
    from cryptography.x509.oid import NameOID

    name, organization = (
        "".join(str(attribute.value) for attribute in certificate.subject.get_attributes_for_oid(field))
        for field in (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME)
    )
    return name, organization
