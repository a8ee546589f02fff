"""Orthanc, a DICOM archive with DICOMweb, on the loopback interface: started for tests and stopped after them."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from loopback import free_port

USER, PASSWORD = "anna", "not-a-secret"
_PROGRAM = shutil.which("Orthanc") or "/usr/sbin/Orthanc"
_PLUGINS = Path("/usr/share/orthanc/plugins")
_DICOMWEB = _PLUGINS / "libOrthancDicomWeb.so"
_SECONDS = 300  # until it answers, beside other runs; one that has ended is noticed at once

needs_orthanc = pytest.mark.skipif(
    not (Path(_PROGRAM).is_file() and _DICOMWEB.is_file()),
    reason="Orthanc is not installed (Debian: orthanc, orthanc-dicomweb)",
)


@dataclass
class Archive:
    """A running Orthanc: the root of its DICOMweb service, and its own interface to look inside."""

    root: str

    @property
    def url(self) -> str:
        return f"{self.root}/dicom-web"

    def get(self, path: str) -> Any:
        return json.loads(self.raw(path))

    def raw(self, path: str, body: bytes | None = None) -> bytes:
        secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        request = urllib.request.Request(self.root + path, body, {"Authorization": f"Basic {secret}"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.read()

    def upload(self, *files: Path) -> None:
        """Not by DICOMweb: what is fetched should not depend on what stores."""
        for file in files:
            self.raw("/instances", file.read_bytes())

    def fetch(self, instance_uid: str, target: Path) -> Path:
        """The file of an instance, by Orthanc's own interface."""
        (found,) = json.loads(
            self.raw(
                "/tools/find", json.dumps({"Level": "Instance", "Query": {"SOPInstanceUID": instance_uid}}).encode()
            )
        )
        target.write_bytes(self.raw(f"/instances/{found}/file"))
        return target


@contextmanager
def running(folder: Path) -> Iterator[Archive]:
    """An empty archive in a folder."""
    port = free_port()
    configuration = {
        "Name": "test",
        "StorageDirectory": str(folder / "db"),
        "IndexDirectory": str(folder / "db"),
        "HttpPort": port,
        "RemoteAccessAllowed": False,
        "DicomServerEnabled": False,
        "AuthenticationEnabled": True,
        "RegisteredUsers": {USER: PASSWORD},
        "Plugins": [str(_DICOMWEB)],
        "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "orthanc.json").write_text(json.dumps(configuration))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([_PROGRAM, str(folder / "orthanc.json")], stdout=log, stderr=log, cwd=folder)
    try:
        archive = Archive(f"http://127.0.0.1:{port}")
        _wait(archive, process, folder / "log")
        yield archive
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def _wait(archive: Archive, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            archive.get("/system")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"Orthanc does not answer: {log.read_text(errors='replace')[-2000:]}")
