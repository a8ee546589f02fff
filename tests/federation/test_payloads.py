"""What methods send besides weights, and what each site is sent."""

from __future__ import annotations

import torch
from federations import make_coordinator, make_workers, run

from panorgan.federation.message import Message
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.base import Method, MethodConfig, Payload, ServerRule, SiteRule, Updates


class Extras(Method):
    """Sends a packed mask and a half-precision map beside the weights, and a fresh dictionary to every site."""

    name = "extras"

    class Site(SiteRule):
        """Two payloads that are no weights."""

        def before_round(self) -> None:
            self.model.load_state_dict({k: self.received.tensors[k] for k in self.model.state_dict()})
            assert self.received.tensors["map"].dtype == torch.float16

        def update(self) -> Payload:
            extra = {"mask": torch.full((4,), 255, dtype=torch.uint8), "map": torch.ones(2, 3, dtype=torch.float16)}
            return Payload({**super().update().tensors, **extra})

    class Server(ServerRule):
        """Reads them from the updates."""

        seen: tuple[str, ...] = ()

        def broadcast(self, site: str) -> Payload:
            return Payload({**self.weights, "map": self.map()})

        def expects(self, site: str) -> dict[str, torch.Tensor]:
            return {**self.weights, "mask": torch.empty(4, dtype=torch.uint8, device="meta"), "map": self.map()}

        def aggregate(self, updates: Updates) -> None:
            super().aggregate(updates)
            assert all(updates.tensor(site, "mask").tolist() == [255] * 4 for site in updates.sites)
            self.seen = tuple(updates.sites)

        def map(self) -> torch.Tensor:
            self._map = getattr(self, "_map", torch.ones(2, 3, dtype=torch.float16))
            return self._map


def test_payloads_beside_the_weights_do_not_become_weights(tiny, tmp_path, monkeypatch):
    experiment = tiny(training={"rounds": 2, "validate_every": 1, "local_steps": 1})
    method = Extras(MethodConfig())
    transport = LocalTransport(make_workers(experiment, tmp_path, method))
    coordinator = make_coordinator(experiment, tmp_path, transport, method=method)
    names = set(coordinator.state.weights)
    requests = 0
    original = Message.to_bytes

    def counted(self: Message) -> bytes:
        nonlocal requests
        requests += self.meta.get("task") == "train"
        return original(self)

    monkeypatch.setattr(Message, "to_bytes", counted)
    coordinator.run()
    assert coordinator.rule.seen == ("north", "south")
    assert set(coordinator.state.weights) == names
    assert requests == 2, "the same tensors are serialised once per round, whatever dictionary they come in"


def test_each_site_gets_its_own_content_from_a_dictionary_that_is_filled_anew(tiny, tmp_path):
    """A rule may reuse one dictionary; what was in it for the last site must not be sent to the next."""

    class Personal(Method):
        class Site(SiteRule):
            def before_round(self) -> None:
                assert self.received.tensors["for"].tolist() == [float(len(self.facts.name) + ord(self.facts.name[0]))]
                self.model.load_state_dict({k: self.received.tensors[k] for k in self.model.state_dict()})

        class Server(ServerRule):
            def broadcast(self, site: str) -> Payload:
                self.payload = getattr(self, "payload", dict(self.weights))
                self.payload["for"] = torch.tensor([float(len(site) + ord(site[0]))])
                return Payload(self.payload)

    experiment, method = tiny(training={"rounds": 1, "validate_every": 0, "local_steps": 1}), Personal(MethodConfig())
    run(experiment, tmp_path, method=method)


def test_an_answer_of_numbers_alone_where_no_tensor_is_expected(tiny, tmp_path):
    class Asking(Method):
        """A round in which sites only report a number."""

        class Site(SiteRule):
            def update(self) -> Payload:
                return Payload(scalars={"depth": 40.0})

        class Server(ServerRule):
            def expects(self, site: str) -> dict[str, torch.Tensor]:
                return {}

            def aggregate(self, updates: Updates) -> None:
                self.depths = [updates.scalars(site)["depth"] for site in updates.sites]

    experiment = tiny(training={"rounds": 1, "validate_every": 0, "local_steps": 1})
    coordinator = run(experiment, tmp_path, method=Asking(MethodConfig()))
    assert coordinator.rule.depths == [40.0, 40.0]
