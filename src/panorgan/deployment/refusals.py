"""What the server's message filter refused, for the site that was refused and for the coordinator."""

from __future__ import annotations

from panorgan.deployment.control import read_json
from panorgan.deployment.folders import Kit, ServerKit
from panorgan.errors import RunError
from panorgan.federation.engine import REFUSALS, REFUSED
from panorgan.federation.site_identity import Refusal

_REPORT_AGAIN_AFTER = 600.0
_FIXES = {
    "revoked": "Ask the coordinator for a renewed kit.",
    "twin": "Stop one of the two; this one may start again half a minute later. If your hospital started no other, "
    "a copy of this kit is in use elsewhere: inform the coordinator, who can revoke it and renew yours.",
}


class RefusedError(RunError):
    """The server refuses this site, and trying again would not help. The kit's systemd unit knows the exit code."""

    exit_code = 77


def forget_refusal(kit: Kit) -> None:
    """A new start is a new attempt."""
    (kit.path / REFUSED).unlink(missing_ok=True)


def raise_refusal(kit: Kit) -> None:
    """If the engine ended because the server refused it permanently, raise the reason."""
    try:
        refusal = Refusal.from_text((kit.path / REFUSED).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return
    if refusal is not None and refusal.code in _FIXES:
        raise RefusedError(refusal.why, code=refusal.code, where=str(kit.path), fix=_FIXES[refusal.code])


class NewRefusals:
    """What the server's message filter has refused since the last look."""

    def __init__(self, kit: ServerKit) -> None:
        self._path = kit.path / REFUSALS
        self._seen = {site: (why, at) for site, _, why, at in self._refused()}

    def new(self) -> list[tuple[str, str, str]]:
        """Site, code and reason. One that keeps trying is reported again after a while, or for another reason."""
        found = []
        for site, code, why, at in self._refused():
            before, last = self._seen.get(site, ("", 0.0))
            if at > last and (why != before or at - last > _REPORT_AGAIN_AFTER):
                found.append((site, code, why))
                self._seen[site] = (why, at)
        return found

    def _refused(self) -> list[tuple[str, str, str, float]]:
        known = {site: facts for site, facts in read_json(self._path).items() if isinstance(facts, dict)}
        return [
            (site, str(facts.get("code", "")), str(facts.get("why", "")), float(facts.get("time", 0.0)))
            for site, facts in sorted(known.items())
        ]
