"""A request signed with the coordinator's keys does not end a site's process: it is refused and written down."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import fuzzing
import pytest
from mutations import Mutator
from refusing import refused

from panorgan.deployment.folders import SiteKit
from panorgan.deployment.site_machine import SiteMachine
from panorgan.errors import MessageError
from panorgan.federation.failures import CODES
from panorgan.federation.message import Message


@pytest.fixture
def machine(copy: Path) -> SiteMachine:
    return SiteMachine(SiteKit(copy / "sites" / "north"), "north")


def test_deep_json_is_refused_and_told_in_the_sites_log(machine):
    header = json.dumps({"__metadata__": {"panorgan": "[" * 100_000 + "]" * 100_000}}).encode()
    with refused("not-a-message", MessageError):
        machine.handle(struct.pack("<Q", len(header)) + header)
    assert "a request that cannot be read" in machine.kit.log.read_text()


def test_mutated_requests_are_refused_or_answered_with_a_code(machine):
    mutator, answered = Mutator(fuzzing.SOUND[-1:], seed=22), 0
    for _ in range(400):
        try:
            answer = machine.handle(mutator.message())
        except MessageError:
            continue
        assert Message.from_bytes(answer).meta["failed"] in CODES
        answered += 1
    assert answered
