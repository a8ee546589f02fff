"""Whether a site's last answer arrived: it may be lost or refused. Pieces for methods, placed before what they extend.

Some methods keep sums at the server of what each site keeps for itself (SCAFFOLD's control variates, FedDyn's h). Both
must change together. So a site takes over a change of its own only when the server says that it heard it.
"""

from __future__ import annotations

from panorgan.methods.base import Payload, ServerRule, SiteRule, Updates
from panorgan.methods.shared.prefixed import prefixed, under

_HEARD = "heard"
_ANSWERED = "answered"


class HeardSite(SiteRule):
    """Knows whether its last answer in training counted."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.answered = 0
        """The round of its last answer; 0 before the first."""

    @property
    def was_heard(self) -> bool:
        """Whether the server has that answer; asked once `received` is set."""
        return self.received.scalars.get(_HEARD) == self.answered

    def after_round(self) -> None:
        """This round's answer is the last one now."""
        super().after_round()
        if self.in_training:
            self.answered = self.round_info.round

    def state(self) -> Payload:
        """The round of the last answer."""
        whole = super().state()
        return Payload(whole.tensors, {**whole.scalars, _ANSWERED: float(self.answered)})

    def load_state(self, state: Payload) -> None:
        """Restore it."""
        super().load_state(state)
        self.answered = int(state.scalars.get(_ANSWERED, 0))


class HearingServer(ServerRule):
    """Tells every site which of its answers was the last that counted."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.heard: dict[str, int] = {}
        """The round of a site's last accepted answer."""

    def broadcast(self, site: str) -> Payload:
        """What the rule sends, and the round of the site's last accepted answer."""
        whole = super().broadcast(site)
        return Payload(whole.tensors, {**whole.scalars, _HEARD: float(self.heard.get(site, 0))})

    def aggregate(self, updates: Updates) -> None:
        """Note who answered."""
        super().aggregate(updates)
        if self.in_training:
            self.heard |= dict.fromkeys(updates.sites, self.round_info.round)

    def state(self) -> Payload:
        """Who was heard when."""
        whole = super().state()
        heard = {site: float(round_) for site, round_ in self.heard.items()}
        return Payload(whole.tensors, {**whole.scalars, **prefixed(f"{_HEARD}/", heard)})

    def load_state(self, state: Payload) -> None:
        """Restore it."""
        super().load_state(state)
        self.heard = {site: int(round_) for site, round_ in under(f"{_HEARD}/", state.scalars).items()}
