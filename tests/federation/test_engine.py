"""The interface of a network engine: who implements it, and what old kits rely on."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine, FakeServer

from panorgan.deployment.engine import network_engine
from panorgan.federation.engine import AdminSession, Engine

HERE = "panorgan.federation.transports.nvflare"


def methods(interface: type) -> dict[str, list[str]]:
    """The parameters of each method."""
    found = inspect.getmembers(interface, inspect.isfunction)
    return {name: list(inspect.signature(own).parameters) for name, own in found if not name.startswith("_")}


def lacks(implementation: type, interface: type) -> dict[str, list[str]]:
    own = methods(implementation)
    return {name: parameters for name, parameters in methods(interface).items() if own.get(name) != parameters}


def test_nvflare_and_the_fake_implement_the_whole_interface():
    assert len(methods(Engine)) == 7
    assert len(methods(AdminSession)) == 8
    assert lacks(type(network_engine()), Engine) == {}
    assert lacks(FakeEngine, Engine) == {}
    assert lacks(FakeServer, AdminSession) == {}


def test_nvflares_session_implements_the_whole_interface():
    pytest.importorskip("nvflare", reason="the network extra is not installed")
    from panorgan.federation.transports.nvflare.session import NVFlareSession

    assert lacks(NVFlareSession, AdminSession) == {}


def test_deployment_imports_without_nvflare():
    """All but the three modules whose classes NVFlare itself builds; the driver is among them."""
    rooms = Path(importlib.import_module("panorgan.deployment").__file__).parent
    modules = sorted({path.stem for path in rooms.glob("*.py")} - {"coordinator_job", "site_job", "site_launcher"})
    program = "import sys, importlib\nsys.modules['nvflare'] = None\n" + "".join(
        f"importlib.import_module('panorgan.deployment.{name}')\n" for name in modules
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


# -- kits of older versions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("panorgan.deployment.coordinator_job.CoordinatorJob", "nvflare.apis.impl.controller.Controller"),
        ("panorgan.deployment.site_job.SiteJob", "nvflare.apis.executor.Executor"),
        ("panorgan.deployment.site_launcher.SiteLauncher", f"{HERE}.launcher.InstalledCodeLauncher"),
        (f"{HERE}.launcher.ServerLauncher", f"{HERE}.launcher.InstalledCodeLauncher"),
        (f"{HERE}.job_check.JobValidator", "nvflare.apis.app_validation.AppValidator"),
        (f"{HERE}.job_check.SiteDeployer", "nvflare.private.fed.utils.app_deployer.AppDeployer"),
        (f"{HERE}.storage.KitStorage", "nvflare.app_common.storages.filesystem_storage.FilesystemStorage"),
        (f"{HERE}.door.Door", f"{HERE}.message_filter.ServerMessageFilter"),
        (f"{HERE}.knocking.Knocking", f"{HERE}.message_filter.SiteMessageFilter"),
    ],
)
def test_every_class_that_an_older_kit_names_is_still_there(path, base):
    """Hospitals have approved files that name these paths; their sites could not start without them."""
    pytest.importorskip("nvflare", reason="the network extra is not installed")
    assert issubclass(named(path), named(base))


def test_an_older_server_kit_keeps_its_one_message_filter(tmp_path):
    resources = tmp_path / "local" / "resources.json"
    resources.parent.mkdir()
    resources.write_text(json.dumps({"components": [{"id": "door", "path": f"{HERE}.door.Door", "args": {}}]}))
    before = resources.read_text()
    assert network_engine().add_message_filter(tmp_path) is False
    assert resources.read_text() == before


def named(path: str) -> type:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
