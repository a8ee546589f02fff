"""Sites in this process, one after the other. The same bytes travel as on a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from panorgan.federation.transports.base import MakeRequest, OnReply, RequestHandler


class LocalTransport:
    """Calls the workers directly; an error at a site surfaces where it happened."""

    def __init__(self, workers: Mapping[str, RequestHandler]) -> None:
        self._workers = dict(sorted(workers.items()))

    @property
    def sites(self) -> Sequence[str]:
        """Names of the workers, sorted."""
        return tuple(self._workers)

    def exchange(
        self, sites: Sequence[str], make_request: MakeRequest, on_reply: OnReply, deadline: float | None = None
    ) -> None:
        """Ask the sites in the given order. There is nothing to wait for."""
        for site in sites:
            on_reply(site, self._workers[site].handle(make_request(site)))
