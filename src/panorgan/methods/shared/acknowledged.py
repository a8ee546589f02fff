"""Acknowledged answers: an answer may be lost or refused. Mixins, placed before the rules that they extend.

In some methods, sites keep tensors whose sum the server keeps (SCAFFOLD's control variates, FedDyn's h). Both must
change together. So a site applies a change to its own only when the server acknowledges the answer that contains it.
"""

from __future__ import annotations

from panorgan.methods.base import Payload, ServerRule, SiteRule, Updates
from panorgan.methods.shared.prefixed import prefixed, under

_ACKNOWLEDGED = "heard"  # in requests and stored states
_ANSWERED = "answered"


class AcknowledgedSite(SiteRule):
    """Knows whether the server accepted its last answer in training."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.answered = 0
        """The round of its last answer; 0 before the first."""

    @property
    def was_acknowledged(self) -> bool:
        """Whether the server has accepted that answer; valid once `received` is set."""
        return self.received.scalars.get(_ACKNOWLEDGED) == self.answered

    def after_round(self) -> None:
        """This round's answer becomes the last one."""
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


class AcknowledgingServer(ServerRule):
    """Names to every site the round of its last accepted answer."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.acknowledged: dict[str, int] = {}
        """The round of a site's last accepted answer."""

    def broadcast(self, site: str) -> Payload:
        """Inherited; and the round of the site's last accepted answer."""
        whole = super().broadcast(site)
        return Payload(whole.tensors, {**whole.scalars, _ACKNOWLEDGED: float(self.acknowledged.get(site, 0))})

    def aggregate(self, updates: Updates) -> None:
        """Inherited; records which sites answered."""
        super().aggregate(updates)
        if self.in_training:
            self.acknowledged |= dict.fromkeys(updates.sites, self.round_info.round)

    def state(self) -> Payload:
        """Inherited; and the round of each site's last accepted answer."""
        whole = super().state()
        rounds = {site: float(round_) for site, round_ in self.acknowledged.items()}
        return Payload(whole.tensors, {**whole.scalars, **prefixed(f"{_ACKNOWLEDGED}/", rounds)})

    def load_state(self, state: Payload) -> None:
        """Restore it."""
        super().load_state(state)
        self.acknowledged = {site: int(round_) for site, round_ in under(f"{_ACKNOWLEDGED}/", state.scalars).items()}
