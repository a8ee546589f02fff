"""Credentials of a DICOMweb server: where they come from, and that they stay secret."""

from __future__ import annotations

import pytest
import requests
from refusing import refused

from panorgan.workflows.dicomweb import DicomWebServer
from panorgan.workflows.dicomweb_access import Access, check_address, read_access

SECRET = "s3cret-word"


def private(path, text):
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_they_come_from_the_environment_or_from_a_file(tmp_path):
    there = {"PANORGAN_DICOMWEB_USER": "anna", "PANORGAN_DICOMWEB_PASSWORD": SECRET, "OTHER": "x"}
    found = read_access(environ=there)
    assert (found.user, found.password.get_secret_value()) == ("anna", SECRET)
    file = private(tmp_path / "c.yaml", f"token: {SECRET}\n")
    assert read_access(file, there).token.get_secret_value() == SECRET
    assert not read_access(file, there).user, "a file replaces the environment"
    assert not read_access(environ={}).is_secret


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("user: anna", "credentials-by-half"),
        (f"password: {SECRET}", "credentials-by-half"),
        (f"{{user: a, password: {SECRET}, token: b}}", "credentials-twice"),
        ("ca: nowhere.pem", "ca-missing"),
        (f"passwort: {SECRET}", "bad-credentials"),
        (f"{{user: a, password: [{SECRET}]}}", "bad-credentials"),
        (SECRET, "bad-credentials"),
        (f"user: [{SECRET}", "bad-credentials"),
        (f"7: {SECRET}", "bad-credentials"),
    ],
)
def test_what_cannot_be_used_is_refused_without_showing_it(tmp_path, text, code):
    with refused(code) as caught:
        read_access(private(tmp_path / "c.yaml", text), {})
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value.__cause__)


def test_a_file_that_others_can_read_is_refused(tmp_path):
    file = private(tmp_path / "c.yaml", f"token: {SECRET}\n")
    file.chmod(0o640)
    with refused("credentials-not-private"):
        read_access(file)
    with refused("bad-credentials"):
        read_access(tmp_path / "absent.yaml")


def test_they_are_shown_nowhere():
    access = Access(user="anna", password=SECRET)
    assert SECRET not in repr(DicomWebServer("https://pacs.example/dicom-web", access))
    assert SECRET not in str(access.as_json())


@pytest.mark.parametrize(
    ("url", "code"),
    [
        (f"https://anna:{SECRET}@pacs.example/dicom-web", "credentials-in-address"),
        ("pacs.example/dicom-web", "bad-dicomweb-address"),
        ("ftp://pacs.example", "bad-dicomweb-address"),
        ("https://", "bad-dicomweb-address"),
        ("https://pacs.example:seven/", "bad-dicomweb-address"),
        ("http://pacs.example/dicom-web", "credentials-in-the-clear"),
        ("http://127.0.0.1.pacs.example/dicom-web", "credentials-in-the-clear"),
    ],
)
def test_addresses_that_would_give_them_away_are_refused(url, code):
    with refused(code) as caught:
        check_address(url, Access(token=SECRET))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8042/dicom-web", "http://[::1]:8042/", "http://localhost/dicom-web"])
def test_on_this_machine_they_may_go_unencrypted(url):
    check_address(url, Access(token=SECRET))
    check_address("http://pacs.example/dicom-web", Access())


def test_certificates_are_verified_unless_an_authority_is_named_which_then_is(tmp_path):
    assert Access().session(requests).verify is True
    ca = private(tmp_path / "ca.pem", "")
    assert Access(ca=ca).session(requests).verify == str(ca)
