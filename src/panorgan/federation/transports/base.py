"""How messages travel: the only difference between a simulation and a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

MakeRequest = Callable[[str], bytes]
OnReply = Callable[[str, bytes], None]


class RequestHandler(Protocol):
    """Turns a request into an answer, at a site."""

    def handle(self, request: bytes) -> bytes:
        """Do what the request asks."""


class Transport(Protocol):
    """Carries one request to each site and returns the answers."""

    @property
    def sites(self) -> Sequence[str]:
        """Names of the sites that can be reached."""

    def exchange(
        self, sites: Sequence[str], make_request: MakeRequest, on_reply: OnReply, deadline: float | None
    ) -> None:
        """Ask every site; call `on_reply(site, answer)` for each that answers, in any order.

        Returns when all have answered or will not, at the latest after `deadline` seconds. `make_request` is called
        once per site, when its turn comes, and again if a site lost the request. Neither function may be called from
        two threads at the same time.
        """
