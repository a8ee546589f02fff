"""The list of revoked kits, and the check that reads it with every message."""

from __future__ import annotations

import os

import pytest
from refusing import refused

from panorgan.errors import ConfigError
from panorgan.federation.revocation import RevocationList, read_revocations, revoke
from panorgan.federation.site_identity import ALIVE_SECONDS, IdentityCheck, Refusal

OLD, NEW = 1_000_000.0, 2_000_000.0
"""When two kits of one site were made."""
BETWEEN = 1_500_000.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reported() -> list[Refusal]:
    return []


@pytest.fixture
def identities(tmp_path, clock, reported) -> IdentityCheck:
    return IdentityCheck(RevocationList(tmp_path / "revoked.yaml"), reported.append, clock)


def let_in(
    identities: IdentityCheck, name: str, token: str, issued: float = OLD, machine: str = "", address: str = ""
) -> None:
    assert identities.register(name, issued, machine, address) is None
    identities.admit(name, token)


# -- the list ----------------------------------------------------------------------------------------------------


def test_the_list_keeps_the_latest_moment_of_everybody(tmp_path):
    path = tmp_path / "revoked.yaml"
    assert read_revocations(path) == {}
    assert revoke(path, "north", BETWEEN)
    assert revoke(path, "ada@example.org", OLD)
    assert not revoke(path, "north", OLD), "what was revoked stays so"
    assert read_revocations(path) == {"north": BETWEEN, "ada@example.org": OLD}


@pytest.mark.parametrize("name", ["no", "007", "1e5", "yes"])
def test_names_that_look_like_something_else_stay_names(name, tmp_path):
    revoke(tmp_path / "revoked.yaml", name, OLD)
    assert read_revocations(tmp_path / "revoked.yaml") == {name: OLD}


@pytest.mark.parametrize("text", ["- north", "north: soon", "north: [", "\x00"])
def test_a_list_that_cannot_be_read_is_refused(text, tmp_path):
    (tmp_path / "revoked.yaml").write_text(text)
    with refused("revocations-unreadable", ConfigError):
        read_revocations(tmp_path / "revoked.yaml")


def test_a_list_that_was_damaged_leaves_the_last_one_in_force(tmp_path, identities):
    path = tmp_path / "revoked.yaml"
    revoke(path, "north", BETWEEN)
    assert identities.register("north", OLD) is not None
    path.write_text("north: [")
    assert identities.register("north", OLD) is not None
    assert identities.register("east", OLD) is None


def test_a_list_that_nobody_could_read_yet_lets_nobody_in(tmp_path, identities):
    (tmp_path / "revoked.yaml").write_text("north: [")
    refusal = identities.register("east", NEW)
    assert refusal is not None
    assert refusal.code == "again", "nothing is wrong with its kit"


# -- revoked kits ------------------------------------------------------------------------------------------------


def test_the_next_message_of_a_revoked_kit_is_refused_and_registering_does_not_help(tmp_path, identities, reported):
    let_in(identities, "north", "token")
    assert identities.check("north", "token") is None
    revoke(tmp_path / "revoked.yaml", "north", BETWEEN)
    assert identities.check("north", "token").code == "revoked"
    assert identities.check("north", "token", heartbeat=True).code == "revoked"
    assert identities.register("north", OLD).code == "revoked"
    assert {refusal.site for refusal in reported} == {"north"}


def test_a_renewed_kit_is_let_in_while_the_revoked_one_stays_out(tmp_path, identities):
    let_in(identities, "north", "stolen", OLD, "thief")
    revoke(tmp_path / "revoked.yaml", "north", BETWEEN)
    let_in(identities, "north", "renewed", NEW, "hospital")  # at once, though the other was heard a moment ago
    assert identities.check("north", "renewed") is None
    assert identities.check("north", "renewed", heartbeat=True) is None
    assert identities.check("north", "stolen") is not None


def test_a_token_from_before_a_restart_of_the_server_does_not_outlive_a_revocation(tmp_path, identities):
    """The engine takes any token that it once signed; whose certificate it was is not known any more."""
    assert identities.check("north", "of an earlier process", heartbeat=True) is None
    revoke(tmp_path / "revoked.yaml", "north", BETWEEN)
    assert identities.check("north", "of an earlier process").code == "again"
    assert identities.check("north", "never seen").code == "again"


def test_others_are_not_concerned(tmp_path, identities):
    let_in(identities, "east", "token")
    revoke(tmp_path / "revoked.yaml", "north", BETWEEN)
    assert identities.check("east", "token") is None
    assert identities.check("east", "token", heartbeat=True) is None
    assert identities.register("east", OLD) is None


def test_a_line_that_is_removed_takes_the_revocation_back(tmp_path, identities):
    path = tmp_path / "revoked.yaml"
    let_in(identities, "north", "token")
    revoke(path, "north", BETWEEN)
    assert identities.check("north", "token") is not None
    os.unlink(path)
    assert identities.check("north", "token") is None


# -- twins -------------------------------------------------------------------------------------------------------


def test_a_second_machine_is_refused_while_the_first_is_alive_and_both_are_named(identities, clock, reported):
    let_in(identities, "north", "first", machine="a", address="10.0.0.1")
    clock.now += ALIVE_SECONDS - 1
    refusal = identities.register("north", OLD, "b", "10.0.0.2")
    assert refusal.code == "twin"
    assert "10.0.0.1" in refusal.why
    assert "10.0.0.2" in refusal.why
    assert reported == [refusal]
    assert identities.check("north", "first", heartbeat=True) is None, "the first goes on"


def test_a_second_machine_may_take_over_when_the_first_is_silent(identities, clock):
    let_in(identities, "north", "first", machine="a")
    clock.now += ALIVE_SECONDS + 1
    let_in(identities, "north", "second", machine="b")


def test_a_machine_that_starts_again_is_welcome_at_once(identities, reported):
    let_in(identities, "north", "first", machine="a")
    let_in(identities, "north", "second", machine="a")
    assert identities.check("north", "second", heartbeat=True) is None
    assert reported == []


@pytest.mark.parametrize("machine", ["", "a"])
def test_a_twin_that_lies_about_its_machine_is_noticed_by_the_token_still_in_use(machine, identities, clock, reported):
    let_in(identities, "north", "first", machine="a")
    let_in(identities, "north", "second", machine=machine)
    clock.now += 5
    assert identities.check("north", "first", heartbeat=True).code == "twin"
    assert [refusal.code for refusal in reported] == ["twin"]
    clock.now += ALIVE_SECONDS + 1
    assert identities.check("north", "first", heartbeat=True) is None, "the other one is silent: it may go on"


def test_twins_are_noticed_after_the_server_was_restarted(identities, clock):
    assert identities.check("north", "first", heartbeat=True) is None
    clock.now += 3
    assert identities.check("north", "second", heartbeat=True).code == "twin"


def test_after_a_restart_of_the_server_a_machine_is_known_by_what_its_heartbeats_say(identities, clock):
    assert identities.check("north", "first", heartbeat=True, machine="a", address="10.0.0.1") is None
    clock.now += 3
    refusal = identities.register("north", OLD, "b", "10.0.0.2")
    assert refusal is not None
    assert refusal.code == "twin"
    assert "10.0.0.1" in refusal.why
    let_in(identities, "north", "second", machine="a")  # the same machine, started again


def test_the_gate_does_not_remember_every_start_of_a_site(identities):
    for number in range(1000):
        let_in(identities, "north", f"token {number}", machine="a")
    assert len(identities._tokens) <= 2


# -- what travels ------------------------------------------------------------------------------------------------


def test_a_refusal_reaches_the_other_side_as_it_is():
    refusal = Refusal("twin", "north", "Two machines: one at 10.0.0.1, one at ::1.")
    assert Refusal.from_text(refusal.to_text()) == refusal


@pytest.mark.parametrize("text", ["", "missing auth token", "panorgan:", "panorgan:other:north:why", "panorgan:twin"])
def test_another_error_is_none_of_ours(text):
    assert Refusal.from_text(text) is None
