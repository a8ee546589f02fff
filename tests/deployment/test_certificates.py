"""Certificates: each defect has its own name."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the network extra is not installed")

from trial_federation import Authority

from panorgan.deployment.certificate_checks import check_credentials, start_warnings
from panorgan.deployment.folders import SiteKit
from panorgan.federation.certificates import Credentials


def verdicts(credentials: Credentials, name: str = "north", **options: object) -> dict[str, tuple[str, str]]:
    """Verdict and code, by name."""
    return {check.name: (check.verdict, check.code) for check in check_credentials(credentials, name, **options)}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_a_good_certificate(authority: Authority, tmp_path: Path) -> None:
    found = check_credentials(authority.write(tmp_path, "north", end=300.5), "north")
    assert [check.verdict for check in found] == ["ok", "ok", "ok"]
    assert all(name in found[0].what for name in ("north", "pilot"))
    assert found[1].what.endswith("(300 days)")
    assert not any(check.fix or check.code for check in found)


def test_another_authority_of_the_same_name_is_not_believed(authority: Authority, tmp_path: Path) -> None:
    own = authority.write(tmp_path / "own", "north")
    other = Authority("pilot").write(tmp_path / "other", "north")
    mixed = Credentials(other.certificate, other.key, own.root)
    assert verdicts(mixed)["certificate"] == ("failed", "certificate-foreign")


def test_a_certificate_for_somebody_else(authority: Authority, tmp_path: Path) -> None:
    found = check_credentials(authority.write(tmp_path, "south"), "north")[0]
    assert (found.verdict, found.code) == ("failed", "wrong-participant")
    assert "'south'" in found.what
    assert "'north'" in found.what


def test_a_participant_whose_name_is_not_known_yet_raises_no_alarm(authority: Authority, tmp_path: Path) -> None:
    found = check_credentials(authority.write(tmp_path, "south"), "")[0]
    assert (found.verdict, found.code) == ("skipped", "")


@pytest.mark.parametrize(
    ("begin", "end", "verdict", "code"),
    [
        (-10, 15, "ok", ""),
        (-10, 13, "warning", "certificate-expires-soon"),
        (-10, 0.5, "warning", "certificate-expires-soon"),
        (-10, -1, "failed", "certificate-expired"),
        (2, 100, "failed", "certificate-not-yet-valid"),
    ],
)
def test_dates(authority: Authority, tmp_path: Path, begin: float, end: float, verdict: str, code: str) -> None:
    found = verdicts(authority.write(tmp_path, "north", begin=begin, end=end))
    assert found["certificate dates"] == (verdict, code)


def test_the_authority_may_expire_first(authority: Authority, tmp_path: Path) -> None:
    """The root ends 400 days from now, whatever a participant's certificate says."""
    own = authority.write(tmp_path, "north", end=900)
    later = time.time() + 390 * 86400
    assert verdicts(own, now=later)["certificate dates"] == ("warning", "certificate-expires-soon")
    assert verdicts(own, now=later + 20 * 86400)["certificate dates"] == ("failed", "certificate-expired")


@pytest.mark.parametrize(("mode", "verdict"), [(0o600, "ok"), (0o400, "ok"), (0o640, "failed"), (0o644, "failed")])
def test_who_may_read_the_key(authority: Authority, tmp_path: Path, mode: int, verdict: str) -> None:
    own = authority.write(tmp_path, "north")
    own.key.chmod(mode)
    found = check_credentials(own, "north")[2]
    assert (found.verdict, found.code) == (verdict, "" if verdict == "ok" else "key-exposed")
    assert found.fix == ("" if verdict == "ok" else f"chmod 600 {own.key}")


def test_a_key_that_does_not_fit_or_is_none(authority: Authority, tmp_path: Path) -> None:
    own = authority.write(tmp_path / "own", "north")
    other = authority.write(tmp_path / "other", "north")
    mixed = Credentials(own.certificate, other.key, own.root)
    assert verdicts(mixed)["private key"] == ("failed", "key-mismatch")
    own.key.write_text("no key")
    assert verdicts(own)["private key"] == ("failed", "not-a-key")
    own.key.unlink()
    assert verdicts(own)["private key"] == ("failed", "key-unreadable")


def test_what_cannot_be_read_is_said_once(authority: Authority, tmp_path: Path) -> None:
    own = authority.write(tmp_path, "north")
    own.root.write_text("no certificate")
    found = check_credentials(own, "north")
    assert [check.verdict for check in found] == ["failed", "skipped", "skipped"]
    assert found[0].code == "certificate-unreadable"
    assert "rootCA.pem" in found[0].what


@pytest.mark.parametrize(("begin", "end", "words"), [(-1, 5, 1), (-9, -1, 1), (1, 90, 1), (-1, 90, 0)])
def test_a_site_says_at_its_start_what_would_otherwise_fail_without_a_word(begin, end, words, tmp_path: Path) -> None:
    """Soon over, over, not yet begun by this machine's clock, and in order."""
    kit = SiteKit(tmp_path)
    Authority().write(kit.startup, "north", begin=begin, end=end)
    assert len(start_warnings(kit)) == words


def test_a_kit_without_a_certificate_says_nothing_at_its_start(tmp_path: Path) -> None:
    assert start_warnings(SiteKit(tmp_path)) == []
