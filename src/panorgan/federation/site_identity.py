"""Which machine may act as which site: revoked certificates are refused, and so is a second machine with one kit.

The network engine's message filter asks here for every message that reaches the server. A machine registers with its
certificate and gets a token, which its later messages carry. A machine that starts again gets a new token and never
uses the old one, so two tokens that are both in use are two machines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from panorgan.federation.revocation import RevocationList, format_moment

Code = Literal["revoked", "twin", "again"]

ALIVE_SECONDS = 30.0
"""A machine holds its name for so long after its last heartbeat; they come every ten seconds."""

_PREFIX = "panorgan:"


@dataclass(frozen=True)
class Refusal:
    """`why` is one sentence, for both sides. `again`: nothing is wrong, but the machine must register again."""

    code: Code
    site: str
    why: str

    def to_text(self) -> str:
        """As it travels to the machine that is refused."""
        return f"{_PREFIX}{self.code}:{self.site}:{self.why}"

    @classmethod
    def from_text(cls, text: str) -> Refusal | None:
        """Read it back; None if it is another error."""
        parts = text.removeprefix(_PREFIX).split(":", 2)
        if not text.startswith(_PREFIX) or len(parts) != 3 or parts[0] not in ("revoked", "twin", "again"):
            return None
        return cls(parts[0], parts[1], parts[2])  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Machine:
    """A token's holder. `issued`: its certificate's first moment; None where the token is older than this process."""

    name: str
    token: str
    issued: float | None
    machine: str
    address: str
    heard: float


class IdentityCheck:
    """`report` gets every refusal that an operator should know; calls may come from several threads."""

    def __init__(
        self,
        revoked: RevocationList,
        report: Callable[[Refusal], None] = lambda refusal: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._revoked, self._report, self._clock = revoked, report, clock
        self._lock = threading.Lock()
        self._registering: dict[str, _Machine] = {}
        self._tokens: dict[str, _Machine] = {}
        self._holder: dict[str, str] = {}

    def register(self, name: str, issued: float, machine: str = "", address: str = "") -> Refusal | None:
        """A machine shows a certificate for `name`. `machine` is the id that it gives itself, and may be empty."""
        refusal = self._check_certificate(name, issued)
        with self._lock:
            if refusal is None:
                refusal = self._check_twin(name, machine, address)
            if refusal is None:
                self._registering[name] = _Machine(name, "", issued, machine, address, self._clock())
        if refusal is not None:
            self._report(refusal)
        return refusal

    def admit(self, name: str, token: str) -> None:
        """The engine accepted the registration as well, and issued a token."""
        with self._lock:
            known = self._registering.pop(name, None)
            if known is not None:
                before = self._holder.get(name)
                kept = {key: other for key, other in self._tokens.items() if other.name != name or key == before}
                self._tokens = {**kept, token: replace(known, token=token, heard=self._clock())}
                self._holder[name] = token

    def check(
        self, name: str, token: str, heartbeat: bool = False, machine: str = "", address: str = ""
    ) -> Refusal | None:
        """Check a message. The answer to a heartbeat can carry a reason, so that these alone are reported.

        `machine` and `address` name a machine whose token is older than this process: it does not register again.
        """
        until = self._revoked.until(name)
        with self._lock:
            known = self._tokens.get(token)
            if until is not None:
                refusal = _check_token(name, known, until)
                if refusal is not None:
                    if heartbeat:
                        self._report(refusal)
                    return refusal
            if not heartbeat:
                return None
            return self._check_heartbeat(known or _Machine(name, token, None, machine, address, 0.0))

    def _check_certificate(self, name: str, issued: float) -> Refusal | None:
        until = self._revoked.until(name)
        return _revoked(name, issued, until) if until is not None and issued <= until else None

    def _check_twin(self, name: str, machine: str, address: str) -> Refusal | None:
        """Refuse a second machine, by the id that it gives itself; the same machine may start again."""
        holder = self._tokens.get(self._holder.get(name, ""))
        if holder is None or not machine or not holder.machine or machine == holder.machine:
            return None
        if self._clock() - holder.heard > ALIVE_SECONDS:
            return None
        until = self._revoked.until(name)
        if until is not None and holder.issued is not None and holder.issued <= until:
            return None  # a revoked kit holds its name no longer
        return _twin(name, holder.address, address)

    def _check_heartbeat(self, sender: _Machine) -> Refusal | None:
        now = self._clock()
        holder = self._tokens.get(self._holder.get(sender.name, ""))
        if holder is not None and holder.token != sender.token and now - holder.heard <= ALIVE_SECONDS:
            refusal = _twin(sender.name, holder.address, sender.address)
            self._report(refusal)
            return refusal
        self._tokens[sender.token] = replace(sender, heard=now)
        self._holder[sender.name] = sender.token
        return None


def _check_token(name: str, holder: _Machine | None, until: float) -> Refusal | None:
    """Some certificates of `name` are revoked: was this token issued for one of them?"""
    if holder is None or holder.issued is None:
        return Refusal("again", name, f"A kit of {name} was revoked: show your certificate again.")
    return _revoked(name, holder.issued, until) if holder.issued <= until else None


def _revoked(name: str, issued: float, until: float) -> Refusal:
    if until == float("inf"):
        return Refusal(
            "again", name, "The server cannot read its list of revoked kits, and accepts no site until then."
        )
    why = f"its certificate is of {format_moment(issued)}, and all up to {format_moment(until)} are refused"
    return Refusal("revoked", name, f"This kit of {name} was revoked: {why}.")


def _twin(name: str, holder: str, other: str) -> Refusal:
    if holder == other:
        places = f" (both at {holder})" if holder else ""
    else:
        places = f" ({holder or 'unknown'} and {other or 'unknown'})"
    return Refusal("twin", name, f"Two machines answer as {name}{places}.")
