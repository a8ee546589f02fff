"""What leaves a site under a method, determined by calling its rules on an example federation.

Nothing is trained: for every site and round, the server rule says which tensors it accepts (`expects`). Networks have
no memory here (torch's meta device), so the default network is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

import torch

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import Method, MethodConfig
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo, Stage
from panorgan.networks import SegmentationNetwork, UNetSettings
from panorgan.networks.organ_parts import group_of_key, groups_of

EXAMPLE_SITES: Mapping[str, tuple[str, ...]] = {
    "east": ("kidney_left", "kidney_right", "spleen"),
    "north": ("liver", "stomach"),
    "south": ("aorta", "liver", "pancreas"),
}
"""Sites of the example federation, and what they annotate: one organ twice, all others once."""
ROUNDS = 20
"""Training rounds of the example: enough to include what happens in some rounds only."""


@dataclass(frozen=True)
class Upload:
    """What each site sends in some rounds of a stage.

    `weights` in words, `tensors` as the patterns under which the method declares them. `size` in bytes, the mean over
    the sites.
    """

    stage: str
    rounds: str
    weights: str
    tensors: tuple[str, ...]
    size: float

    @property
    def relative(self) -> float:
        """Its size relative to a round of FedAvg."""
        return self.size / _fedavg_size()

    @property
    def words(self) -> str:
        """Weights and tensors in one phrase."""
        named = [f"`{pattern}`" for pattern in self.tensors]
        return ", and ".join([*([self.weights] if self.weights else []), *named]) or "numbers alone"


def example_federation() -> Federation:
    """Three sites that annotate different organs, and one organ that two of them do."""
    organs = sorted({organ for annotated in EXAMPLE_SITES.values() for organ in annotated})
    facts = {site: SiteInfo(site, 10, dict.fromkeys(annotated, 10)) for site, annotated in EXAMPLE_SITES.items()}
    return Federation(Vocabulary(organs), facts)


def empty_network(method: Method, network: UNetSettings, federation: Federation) -> SegmentationNetwork:
    """The network that a federation delivers, on the meta device."""
    with torch.device("meta"):
        return method.build_network(network, federation)


def uploads(
    method: Method,
    network: UNetSettings | None = None,
    federation: Federation | None = None,
    rounds: int = ROUNDS,
) -> tuple[Upload, ...]:
    """What each site may send, stage by stage; equal rounds of a stage are merged."""
    federation = federation or example_federation()
    delivered = empty_network(method, network or UNetSettings(), federation)
    rule = method.Server(method.config, federation, delivered.state_dict())
    found = []
    for stage in method.stages(rounds):
        alike: dict[frozenset[tuple[str, frozenset[str]]], list[int]] = {}
        expected: dict[int, dict[str, Mapping[str, torch.Tensor]]] = {}
        for round_ in range(1, stage.rounds + 1):
            rule.round_info = RoundInfo(stage.name, round_, stage.rounds)
            expected[round_] = {site: dict(rule.expects(site)) for site in federation.sites}
            keys = frozenset((site, frozenset(tensors)) for site, tensors in expected[round_].items())
            alike.setdefault(keys, []).append(round_)
        for numbers in alike.values():
            by_site = expected[numbers[0]]
            sizes = [sum(t.numel() * t.element_size() for t in tensors.values()) for tensors in by_site.values()]
            sent = {site: set(tensors) for site, tensors in by_site.items()}
            found.append(
                Upload(
                    stage.name,
                    _rounds_in_words(numbers, stage),
                    _weights_in_words(sent, delivered, federation),
                    _patterns(sent, delivered, method),
                    sum(sizes) / len(sizes),
                )
            )
    return tuple(found)


@cache
def _fedavg_size() -> float:
    """Bytes that a site sends per round under plain FedAvg."""
    (every_round,) = uploads(Method(MethodConfig()))
    return every_round.size


def _rounds_in_words(numbers: list[int], stage: Stage) -> str:
    if len(numbers) == stage.rounds:
        return "once" if stage.rounds == 1 else "every round"
    if numbers == [stage.rounds]:
        return "last round"
    if numbers == list(range(1, stage.rounds)):
        return "before the last round"
    return "first round" if numbers == [1] else f"{len(numbers)} rounds of {stage.rounds}"


def _patterns(sent: Mapping[str, set[str]], network: SegmentationNetwork, method: Method) -> tuple[str, ...]:
    """What is sent besides weights, by the patterns that the method declares; undeclared ones by name."""
    extra = sorted(set().union(*sent.values()) - set(network.state_dict()))
    named = {next((p for p in method.tensors if fnmatchcase(key, p)), key): None for key in extra}
    return tuple(named)


def _weights_in_words(sent: Mapping[str, set[str]], network: SegmentationNetwork, federation: Federation) -> str:
    """Which weights the sites send; empty if none."""
    every = set(network.state_dict())
    weights = {site: keys & every for site, keys in sent.items()}
    if not any(weights.values()):
        return ""
    if all(keys == every for keys in weights.values()):
        return "all weights"
    common = {key for key in every if group_of_key(key) is None}
    if special := every - common:
        modules = " and ".join(sorted({key.partition(".")[0].replace("_", " ") for key in special}))
        groups = {site: groups_of(federation.organs_of(site)) for site in weights}
        own = {site: {key for key in special if group_of_key(key) in groups[site]} for site in weights}
        if all(keys == common | own[site] for site, keys in weights.items()):
            return f"all weights but the {modules} of organs that it does not annotate"
        if all(keys == own[site] for site, keys in weights.items()):
            return f"the {modules} of its own organs, no other weights"
    if sum(map(len, weights.values())) == len(set().union(*weights.values())):
        return "the weights of its own network, which no other site trains"
    shared = set.intersection(*weights.values())
    of_sites = [keys - shared for keys in weights.values()]
    if shared and all(of_sites) and sum(map(len, of_sites)) == len(every - shared):
        return "what all sites share, and the weights of its own part, which no other site trains"
    return _parts_in_words(weights, network)


def _parts_in_words(weights: Mapping[str, set[str]], network: SegmentationNetwork) -> str:
    """The same by the names of the network's parts, where no simpler rule applies."""
    every, union = set(network.state_dict()), set().union(*weights.values())
    differ = "" if all(keys == union for keys in weights.values()) else " (not the same at every site)"
    parts = {name: set(keys) for name, keys in network.parts().items()}
    for name, keys in parts.items():
        if union == every - keys:
            return f"all weights but those of the part {name}{differ}"
    touched = [
        name if keys <= union else f"some of {name}" for name, keys in parts.items() if name != "norm" and keys & union
    ]
    return f"weights of the {_plural('part', touched)} {', '.join(touched)}{differ}"


def _plural(word: str, things: Iterable[object]) -> str:
    return word if len(list(things)) == 1 else f"{word}s"
