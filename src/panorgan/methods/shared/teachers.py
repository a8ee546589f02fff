"""Teachers: each site's own model, exchanged once, and applied once to every training volume.

Both halves of what methods with teachers share; no formula of a particular method. A site sends its teacher as
`teacher/<key>`, and receives the others' as `teacher/<site>/<key>`. Both sides keep them in their tensor store, one
entry per site.

A teacher that did not arrive is not lost. The server knows which teachers are due and asks for them with its next
request (`SEND`); the site sends its teacher with its answer, in whatever stage the run is by then.

At a site: `receive` in `before_round`, `keep` the own one, `requested` in `update`, `predictions` for
`teacher_predictions`. At the server: `expects` and `collect` while teachers come in, `mark_due` when they are due,
`for_site` and `request_flags` in `broadcast`, `mark_delivered` in `aggregate`, `numbers` and `load` for the rule's
state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch

from panorgan.data.labels import CONVENTIONS
from panorgan.errors import RunError
from panorgan.methods.base import SiteTools
from panorgan.methods.protocol import Payload, Scalars, Tensors, TensorStore, Updates
from panorgan.networks import SegmentationNetwork
from panorgan.preparation.store import StoredCase
from panorgan.preparation.teacher_predictions import TeacherPredictions

PREFIX = "teacher/"
SEND = "send_teacher"
"""A number in a request: the server lacks this site's teacher."""
_UP_TO_DATE = "equipped/"
_OWING = "due_sites/"
# Avoids 0/0 where a teacher is certain of another organ.
_NEVER = 1e-9
# Part of the cache key: changes when predictions are computed or stored differently.
_FORMAT = 2


def as_teacher(weights: Tensors) -> dict[str, torch.Tensor]:
    """Weights under the keys by which a site sends them as its teacher: `teacher/<key>`."""
    return {f"{PREFIX}{key}": value for key, value in weights.items()}


class SiteTeachers:
    """The teachers at a site.

    Parameters
    ----------
    tools : what the worker passes to the rule.
    build : builds the network of a site's teacher; its weights do not matter.
    owners : the organs that each site's teacher is used for; may be replaced when teachers arrive.
    """

    def __init__(
        self,
        tools: SiteTools,
        build: Callable[[str], SegmentationNetwork],
        owners: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.tools, self.owners = tools, dict(owners)
        self.taught: dict[str, tuple[str, ...]] = dict(owners)
        """The organs that each site's teacher was trained on, whether it is used for them or not."""
        self.asked = False
        """Whether the server lacks this site's teacher, according to the last request."""
        self._build = build
        self._present = {n.removeprefix(PREFIX) for n in tools.tensor_store.names() if n.startswith(PREFIX)}
        self._fingerprints: dict[str, str] = {}

    def receive(self, payload: Payload) -> Payload:
        """Keep the teachers in a payload; returns the rest.

        Set `self.received` to that rest: teachers must not occupy the device while the site trains.
        """
        teachers: dict[str, dict[str, torch.Tensor]] = {}
        rest = {}
        for key, value in payload.tensors.items():
            site, slash, own_key = key.removeprefix(PREFIX).partition("/")
            if key.startswith(PREFIX) and slash:
                teachers.setdefault(site, {})[own_key] = value
            else:
                rest[key] = value
        for site, tensors in sorted(teachers.items()):
            self.keep(site, tensors)
        self.asked = SEND in payload.scalars
        self._refuse_gaps(payload.scalars)
        return Payload(rest, payload.scalars)

    def keep(self, site: str, tensors: Tensors) -> None:
        """Put a site's teacher into the tensor store: a received one, or the site's own."""
        self.tools.tensor_store.put(f"{PREFIX}{site}", tensors)
        self._present.add(site)
        self._fingerprints.pop(site, None)

    def requested(self, site: str) -> dict[str, torch.Tensor]:
        """This site's own teacher as it is sent, if the server requested it and it exists; else nothing."""
        if not self.asked or site not in self._present:
            return {}
        return as_teacher(self.tools.tensor_store.get(f"{PREFIX}{site}"))

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites whose teacher is in the tensor store, sorted."""
        return tuple(sorted(self._present))

    def known(self) -> tuple[str, ...]:
        """Organs that a teacher in the tensor store knows, sorted."""
        return tuple(sorted({organ for site in self._sites() for organ in self.owners[site]}))

    def sites_knowing(self, organ: str) -> tuple[str, ...]:
        """Sites whose teacher knows an organ, sorted."""
        return tuple(site for site in self._sites() if organ in self.owners[site])

    def predictions(
        self,
        names_of_case: Callable[[StoredCase], tuple[str, ...]],
        cached: bool = True,
        per_step: int | None = None,
    ) -> TeacherPredictions:
        """Probabilities of organs for the training cases: per organ the mean over the teachers that know it.

        For a teacher with softmax channels it is the probability against background and all organs on which the teacher
        was not trained: those channels carry no information. Above one half then means more probable than background.

        `names_of_case` says which organs a case needs; those that no teacher knows are left out.
        """
        known = frozenset(self.known())

        def names_of(case: StoredCase) -> tuple[str, ...]:
            return tuple(name for name in names_of_case(case) if name in known)

        cases = self.tools.cases
        asked = sorted({name for case in cases for name in names_of(case)})
        panel = _Panel(self.tools, self.load, self.sites_knowing, self.taught)
        return TeacherPredictions(cases, self._key(asked), names_of, panel, cached, per_step, panel.release)

    def load(self, site: str) -> SegmentationNetwork:
        """A site's teacher, frozen. Building it draws random weights, which must not shift other random draws."""
        with torch.random.fork_rng(devices=[]):
            network = self._build(site)
        network.load_state_dict(self.tools.tensor_store.get(f"{PREFIX}{site}"))
        return network.requires_grad_(False).eval()

    # -- details -------------------------------------------------------------------------------------------

    def _sites(self) -> list[str]:
        """Sites with a teacher in the tensor store that knows something, sorted."""
        return sorted(self._present & self.owners.keys())

    def _refuse_gaps(self, numbers: Scalars) -> None:
        """The server's roster says which teachers must be here by now: those it sent, and the site's own."""
        roster = {name.removeprefix(PREFIX) for name in numbers if name.startswith(PREFIX)}
        if gone := sorted(roster - self._present):
            raise RunError(
                f"The teachers of {', '.join(gone)} are not here, though this site made or received them.",
                code="teachers-missing",
                why="the site's folder was changed, or is another one than before",
                fix="Restore the site's folder from a backup, or start a new run.",
            )

    def _key(self, organs: Iterable[str]) -> str:
        """Hash of everything that predictions depend on besides the case: the teachers of each organ, and inference."""
        digest = hashlib.sha256(f"format {_FORMAT}\n{self.tools.inference_key}\n".encode())
        for organ in organs:
            asked = [f"{site}={self._fingerprint(site)} {self.taught.get(site)}" for site in self.sites_knowing(organ)]
            digest.update(f"{organ}: {', '.join(asked)}\n".encode())
        return digest.hexdigest()[:32]

    def _fingerprint(self, site: str) -> str:
        """Hash of a teacher: its layers, its channels and its weights."""
        if site not in self._fingerprints:
            with torch.device("meta"):
                network = self._build(site)
            layers = f"{network!r}\n{network.channels}\n{CONVENTIONS[network.activation]}\n"
            digest = hashlib.sha256(layers.encode())
            for key, value in sorted(self.tools.tensor_store.get(f"{PREFIX}{site}").items()):
                digest.update(f"{key} {value.dtype} {list(value.shape)}\n".encode())
                digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            self._fingerprints[site] = digest.hexdigest()
        return self._fingerprints[site]


class _Panel:
    """Teachers in use: loaded on first use, freed by `release`."""

    def __init__(
        self,
        tools: SiteTools,
        load: Callable[[str], SegmentationNetwork],
        sites_knowing: Callable[[str], tuple[str, ...]],
        taught: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._tools, self._load, self._sites_knowing, self._taught = tools, load, sites_knowing, taught
        self._networks: dict[str, SegmentationNetwork] = {}

    def __call__(self, image: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        """Mean probabilities [len(names), X, Y, Z] for an image [X, Y, Z]; teachers are summed in sorted order."""
        asked = {name: self._sites_knowing(name) for name in names}
        sums: dict[str, torch.Tensor] = {}
        for site in sorted({site for sites in asked.values() for site in sites}):
            if site not in self._networks:
                self._networks[site] = self._load(site)
            network = self._networks[site]
            probabilities = self._tools.predict(network, image).float()
            own = [network.channels.index(organ) for organ in self._taught.get(site, ())]
            for name in names:
                if site in asked[name]:
                    channel = probabilities[network.channels.index(name)]
                    if network.activation == "softmax":
                        nothing = (1 - probabilities[own].sum(0)).clamp_(min=_NEVER)
                        channel = channel / (channel + nothing)
                    sums[name] = sums[name] + channel if name in sums else channel
        return torch.stack([sums[name] / len(asked[name]) for name in names])

    def release(self) -> None:
        """Free the networks: training needs the memory."""
        self._networks.clear()


class ServerTeachers:
    """All teachers of a federation, which site has received which, and which teachers are due.

    Every batch of incoming teachers is an edition. A site is sent everything newer than the last edition it has seen;
    so a site that missed the exchange, or joins later, gets everything with its next request.
    """

    def __init__(self, tensor_store: TensorStore) -> None:
        self.tensor_store = tensor_store
        self._editions: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._owing: set[str] = set()

    def expects(self, weights: Tensors) -> dict[str, torch.Tensor]:
        """What a site may send as its teacher, given weights of the same keys and shapes; there are no reference values
        to compare it with."""
        return as_teacher({key: torch.empty_like(value, device="meta") for key, value in weights.items()})

    def mark_due(self, sites: Iterable[str]) -> None:
        """Mark teachers as due: those of these sites that have sent none are requested until the site answers. Call
        before `collect`."""
        self._owing |= set(sites) - self._editions.keys()

    @property
    def due_sites(self) -> tuple[str, ...]:
        """Sites whose teacher is due, sorted."""
        return tuple(sorted(self._owing))

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites whose teacher has arrived, sorted."""
        return tuple(sorted(self._editions))

    def collect(self, updates: Updates) -> None:
        """Keep every teacher that arrived, the newest of several; a site that was asked and sent none has none."""
        edition = max(self._editions.values(), default=0) + 1
        for site in updates.sites:
            keys = [key for key in updates.keys(site) if key.startswith(PREFIX)]
            if keys:
                self.tensor_store.put(
                    f"{PREFIX}{site}", {k.removeprefix(PREFIX): updates.tensor(site, k) for k in keys}
                )
                self._editions[site] = edition
            self._owing.discard(site)

    def for_site(self, site: str) -> dict[str, torch.Tensor]:
        """The others' teachers that a site has not seen yet, as `teacher/<other>/<key>`."""
        return {
            f"{PREFIX}{other}/{key}": value
            for other in self._others(site)
            if self._editions[other] > self._seen.get(site, 0)
            for key, value in self.tensor_store.get(f"{PREFIX}{other}").items()
        }

    def request_flags(self, site: str) -> dict[str, float]:
        """Numbers for a site: which teachers it must have by now, its own included; and whether its own is due.

        The same for all sites whose teacher is not due, so that their request is encoded once.
        """
        roster = {f"{PREFIX}{known}": float(edition) for known, edition in sorted(self._editions.items())}
        return {**roster, SEND: 1.0} if site in self._owing else roster

    def mark_delivered(self, sites: Iterable[str]) -> None:
        """Record that these sites answered a request with `for_site`. In the same round, call before `collect`."""
        newest = max(self._editions.values(), default=0)
        self._seen |= dict.fromkeys(sites, newest)

    @property
    def up_to_date(self) -> tuple[str, ...]:
        """Sites that have received every teacher, among those that received any."""
        return tuple(
            site
            for site, seen in sorted(self._seen.items())
            if all(self._editions[other] <= seen for other in self._others(site))
        )

    def numbers(self) -> dict[str, float]:
        """What the coordinator must keep: editions by site, the newest that each site has seen, and which are due."""
        editions = {f"{PREFIX}{site}": float(edition) for site, edition in self._editions.items()}
        seen = {f"{_UP_TO_DATE}{site}": float(edition) for site, edition in self._seen.items()}
        return {**editions, **seen, **{f"{_OWING}{site}": 1.0 for site in self._owing}}

    def load(self, numbers: Scalars) -> None:
        """Restore what `numbers` returned; other numbers of a rule's state are ignored."""
        self._editions = _counts(numbers, PREFIX)
        self._seen = _counts(numbers, _UP_TO_DATE)
        self._owing = set(_counts(numbers, _OWING))

    def _others(self, site: str) -> list[str]:
        return sorted(other for other in self._editions if other != site)


def _counts(numbers: Scalars, prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): int(value) for name, value in numbers.items() if name.startswith(prefix)}
