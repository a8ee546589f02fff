"""A port that was changed in `coordinator.yaml` only is refused, wherever it would be ignored."""

from __future__ import annotations

import pytest
import yaml
from refusing import refused

pytest.importorskip("nvflare", reason="the network extra is not installed")

from panorgan.deployment.addresses import refuse_another_address
from panorgan.deployment.drive import drive
from panorgan.deployment.folders import ServerKit
from panorgan.deployment.preflight import preflight_server
from panorgan.deployment.processes import run_server
from panorgan.errors import ConfigError


def edited(kit: ServerKit, **changes: object) -> None:
    kit.settings.write_text(yaml.safe_dump({**yaml.safe_load(kit.settings.read_text()), **changes}))


@pytest.mark.parametrize("change", [{"port": 9999}, {"host": "elsewhere.example.org"}])
@pytest.mark.parametrize("command", [refuse_another_address, drive, run_server])
def test_an_address_that_the_kits_do_not_know_is_refused_with_the_way_out(command, change, copy):
    kit = ServerKit(copy / "server")
    edited(kit, **change)
    with refused("address-mismatch", ConfigError) as caught:
        command(kit)
    assert "federation.example.org:8443" in caught.value.what
    assert str(next(iter(change.values()))) in caught.value.what
    assert str(kit.settings) in caught.value.where
    assert "init" in caught.value.fix


def test_preflight_says_it_too(copy):
    kit = ServerKit(copy / "server")
    assert "address" not in {check.name for check in preflight_server(kit)}
    edited(kit, port=9999)
    (check,) = [check for check in preflight_server(kit) if check.name == "address"]
    assert (check.verdict, check.code) == ("failed", "address-mismatch")


def test_an_address_as_it_was_made_and_a_kit_without_one_are_fine(copy):
    kit = ServerKit(copy / "server")
    refuse_another_address(kit)
    (kit.startup / "fed_server.json").unlink()
    refuse_another_address(kit)
