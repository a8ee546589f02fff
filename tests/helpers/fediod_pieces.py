"""FedIOD's rules at a site of the tiny federation and at a server, and updates made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from federations import make_workers

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import RoundInfo
from panorgan.methods.fediod import FedIOD, FedIODConfig
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.networks import UNetSettings

SMALL: dict[str, Any] = {"layers": 2, "heads": 3, "head_width": 4, "mlp_width": 8}
FEDIOD: dict[str, Any] = {"name": "fediod", **SMALL}
SLICES: dict[str, Any] = {
    "network": {"dimensions": 2},
    "training": {"sampling": {"patch_size": [16, 16, 1], "batch_size": 4}},
}
TOKENS_HERE = 16  # 16 × 16, halved twice along each axis


def rule_at(tiny, folder: Path, site: str, method: dict[str, Any] = FEDIOD, **changes: Any) -> FedIOD.Site:
    """The rule of a site of the tiny federation, on slices, with its first weights."""
    workers = make_workers(tiny(method=method, **{**SLICES, **changes}), folder)
    vocabulary = workers[site].setup.vocabulary
    federation = Federation(vocabulary, {name: worker.facts() for name, worker in workers.items()})
    rule = workers[site]._ready_rule(federation)
    assert isinstance(rule, FedIOD.Site)
    rule.round_info = RoundInfo("train", 5, 10)
    return rule


def attention(depth: int, seed: int = 0, tokens: int = TOKENS_HERE) -> torch.Tensor:
    scores = torch.randn(depth, tokens, tokens, generator=torch.Generator().manual_seed(seed))
    return (2 * scores).softmax(2)


class Answers:
    """Updates in memory: site → (arrays, numbers)."""

    def __init__(self, sent: dict[str, tuple[dict[str, torch.Tensor], dict[str, float]]]) -> None:
        self.sent, self.sites = sent, tuple(sorted(sent))

    def keys(self, site: str):
        return tuple(self.sent[site][0])

    def tensor(self, site: str, key: str):
        return self.sent[site][0][key]

    def scalars(self, site: str):
        return self.sent[site][1]

    def mean(self, weight):
        means = {}
        for key in {key for site in self.sites for key in self.keys(site)}:
            weights = {site: weight(site, key) for site in self.sites if key in self.keys(site)}
            if sum(weights.values()) > 0:
                parts = [w * self.tensor(site, key).double() for site, w in weights.items()]
                means[key] = (sum(parts) / sum(weights.values())).float()
        return means


def server_of(federation: Federation | None = None, **settings: Any) -> FedIOD.Server:
    facts = {"a": SiteInfo("a", 30, {"liver": 30}), "b": SiteInfo("b", 10, {"spleen": 10})}
    federation = federation or Federation(Vocabulary(["liver", "spleen"]), facts)
    config = FedIODConfig(**{**SMALL, **settings})
    torch.manual_seed(0)
    network = FedIOD(config).build_network(UNetSettings(dimensions=2, features=(4, 8)), federation)
    server = FedIOD.Server(config, federation, network.state_dict())
    server.round_info = RoundInfo("train", 2, 10)
    return server


def aggregate(server: FedIOD.Server, sent: dict[str, tuple[dict[str, torch.Tensor], dict[str, float]]]) -> None:
    server.aggregate(Answers(sent))
