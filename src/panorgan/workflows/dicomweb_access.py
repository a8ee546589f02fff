"""Credentials for a DICOMweb server, from the environment or a file, never from the command line."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic import Field, SecretStr, ValidationError, model_validator

from panorgan.errors import DataError
from panorgan.settings import SettingError, Settings

PREFIX = "PANORGAN_DICOMWEB_"
_OTHERS = 0o077


class Access(Settings):
    """Credentials of one server: user and password, or a token, or none of them."""

    user: str = Field("", description="for HTTP Basic authentication, with `password`")
    password: SecretStr = SecretStr("")
    token: SecretStr = Field(SecretStr(""), description="for `Authorization: Bearer`")
    ca: Path | None = Field(None, description="certificates to verify the server's against; the system's if left out")

    @model_validator(mode="after")
    def _one_way(self) -> Access:
        if bool(self.user) != bool(self.password):
            raise SettingError("user and password belong together", code="credentials-by-half")
        if self.user and self.token:
            raise SettingError("give user and password, or a token, not both", code="credentials-twice")
        if self.ca is not None and not self.ca.is_file():
            raise SettingError(f"there is no file {self.ca}", code="ca-missing")
        return self

    @property
    def is_secret(self) -> bool:
        """Whether there is something to keep secret."""
        return bool(self.user or self.token)

    def session(self, requests: Any) -> Any:
        """A session of `requests` that sends the credentials and verifies the server's certificate."""
        session = requests.Session()
        if self.ca is not None:
            session.verify = str(self.ca)
            session.trust_env = False  # else REQUESTS_CA_BUNDLE would come first
        if self.user:
            session.auth = (self.user, self.password.get_secret_value())
        elif self.token:
            session.auth = _bearer(self.token.get_secret_value())
        return session


def _bearer(token: str) -> Any:
    """Bearer authentication as an auth object: a `.netrc` would replace a plain header."""

    def add(request: Any) -> Any:
        request.headers["Authorization"] = f"Bearer {token}"
        return request

    return add


def read_access(file: Path | None = None, environ: Mapping[str, str] = os.environ) -> Access:
    """From a YAML file (`user`, `password`, `token`, `ca`), else from PANORGAN_DICOMWEB_USER and so on."""
    if file is None:
        where, given = "environment", {name: environ[key] for name, key in _keys().items() if environ.get(key)}
    else:
        where, given = str(file), _content(file)
    try:
        return Access(**given)
    except ValidationError as error:
        first = error.errors()[0]
        reason = first.get("ctx", {}).get("error")
        # Names and reasons, never the values: they are secrets.
        raise DataError(
            "The credentials of the DICOMweb server cannot be used.",
            code=reason.code if isinstance(reason, SettingError) else "bad-credentials",
            where=": ".join([where, *map(str, first["loc"])]),
            why=first["msg"],
            fix="Give user and password, or token; and ca where the server's certificate is your hospital's own.",
        ) from None


def _keys() -> dict[str, str]:
    return {name: PREFIX + name.upper() for name in Access.model_fields}


def _content(file: Path) -> dict[str, Any]:
    try:
        if os.name == "posix" and file.stat().st_mode & _OTHERS:
            raise DataError(
                "Others can read the file of credentials.",
                code="credentials-not-private",
                where=str(file),
                fix=f"chmod 600 {file}, and change the password if others use this machine.",
            )
        content = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(
            "The file of credentials cannot be read.",
            code="bad-credentials",
            where=str(file),
            why=error.strerror or "" if isinstance(error, OSError) else "it is not YAML",
            fix="Write a YAML file with user and password, or with token.",
        ) from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise DataError(
            "The file of credentials cannot be read.",
            code="bad-credentials",
            where=str(file),
            why="it holds no settings",
            fix="Write a YAML file with user and password, or with token.",
        )
    return content


def check_address(url: str, access: Access) -> None:
    """Refuse an address that is invalid, contains a password, or would send one unencrypted."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        parts, host = urlsplit(""), ""
    if parts.username or parts.password:
        raise DataError(
            "An address must not hold credentials.",
            code="credentials-in-address",
            where=f"{parts.scheme}://…@{host}",
            why="the address of a command is in the shell's history and in the list of processes",
            fix="Set them in the environment or in the file of --credentials (docs/predict.md).",
        )
    if parts.scheme not in ("http", "https") or not host:
        raise DataError(
            "This is no address of a DICOMweb service.",
            code="bad-dicomweb-address",
            where=url,
            fix="Give the root of the service, such as https://pacs.example/dicom-web.",
        )
    if access.is_secret and parts.scheme == "http" and not _is_loopback(host):
        raise DataError(
            "Credentials would cross the network unencrypted.",
            code="credentials-in-the-clear",
            where=url,
            fix="Use the https address of the service.",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
