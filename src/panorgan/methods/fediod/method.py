"""FedIOD — attention between places of the image relates a site's organs to organs that only other sites label.

Wan, Yan and Yu, "FedIOD: Federated multi-organ segmentation from partial labels by exploring inter-organ dependency".
One encoder for all sites, and a decoder per organ, trained only by the sites that annotate it; between them

- *T*: a transformer. The attention that a place receives re-weights the skip connections (eqs. 1, 2);
- *Reg*: after training, a site computes the attention maps of the scans that it segments best, slice by slice. Their
  minimum and maximum over scans (eqs. 3 to 6) go to the server, which fuses those of all sites (eqs. 7 to 9). From then
  on, a loss asks every map to contain the fused intersection and lie within the fused union (eqs. 10 to 14);
- *DA*: integrated gradients measure how much each attention head contributes to a site's own organs (eqs. 17, 18),
  which sets the site's weight in the mean of that head's weights (eqs. 19, 20). Everything else is averaged as in
  FedAvg.

With all three off it is `multidecoder`. In round 1 sites report how many slices their scans have, and the server sets
the depth of all maps to the median. Sites send maps from round 2 on and are regularised from round 3 on, or later with
`regularisation_start`; in the last round they send none. The log holds, for every site, the largest factor of a skip
connection and how evenly heads attend; and for the server the largest weight of a site in a head.

Decisions where the paper says nothing or cannot be followed exactly:

- eq. 2 is taken as printed, and added: a skip connection x becomes x + x·W, where W sums to 1 over all places. Scaled
  to a mean of 1, one place of a hundred multiplies x a hundredfold within three steps of AdamW. With `gate: sigmoid`,
  W is twice the sigmoid of the attention that a place receives beyond its even share;
- under AdamW the transformer learns at 1/16 of the rate (`transformer_rate`), and its result is normalised: at one rate
  for all, the deepest features grow a hundredfold. Layers normalise first; positions are sines that enter queries and
  keys only. All heads are as wide as the tokens, without biases;
- a scan's Dice loss is that of all its slices together; τ and µ are a fifth of the scans, at least one;
- maps are those of whole slices, cropped or padded around their centre to the size of a patch; a training patch is
  compared with the map of its slice, wherever it was cut. A slice is compared with the mean of three fused ones, its
  own and its neighbours;
- the common depth is the median of the sites' medians, each counted once per case; stacks deeper than `map_depth` are
  resampled to it, so that maps do not outgrow the weights;
- the weights of eqs. 8 and 9 fall with the absolute distance from the mean, and the 1/K of eq. 7 is left out. Distances
  of attention are so small that this is nearly a plain mean; `fusion_scale` amplifies them (see `attention_maps`);
- eqs. 10 and 11 are shares to be maximised, so that 1 − share is the loss, with a weight of 0.1 each, from 3 % of the
  rounds on. The gate's α = 1000 is that of 256 tokens and scaled with their number, its β the mean of each row;
- eq. 17's F is the probability of the site's own organs on their own voxels, its integral has 15 steps from 0; maps of
  all layers are faded in together, and the skip connections' weights with them;
- eq. 18's maximum is over a scan's slices and all entries of a head's map too: their sum cancels. A negative HA counts
  as 0, and a head without any contribution is averaged by n_k;
- λ applies from 3 % of the rounds on (`aggregation_start`): before, attributions are noise. It covers a head's queries,
  keys, values and its part of the output; the rest of the transformer is averaged by n_k;
- a pass over the data is as many patches as a site has slices. They are drawn as for every method, most of them around
  an organ (`training.sampling.foreground`), and the rate falls as configured (`training.optimizer.schedule`).

The paper works on slices. With 3D patches a scan has one map, that of its centre: nothing is stacked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch

from panorgan.anatomy import Vocabulary
from panorgan.errors import ConfigError, RunError
from panorgan.methods.base import LOSS_IN_PARTS, Federation, Method, Payload, Scalars, ServerRule, SiteRule, Updates
from panorgan.methods.fediod.attention_containment import ALPHA, containment
from panorgan.methods.fediod.attention_maps import SliceTargets, best_scans, fuse, packed, unpacked
from panorgan.methods.fediod.head_attribution import head_weights
from panorgan.methods.fediod.inter_organ import (
    NUMBERS_ONLY,
    AttentionLoss,
    InterOrganNetwork,
    InterOrganSettings,
    head_of_key,
)
from panorgan.methods.fediod.scan_inspection import ScanInspector
from panorgan.methods.fediod.settings import FedIODConfig
from panorgan.methods.registry import register
from panorgan.methods.shared.ablation import AblationRow
from panorgan.networks.settings import OrganParts, UNetSettings
from panorgan.preparation.batch import Batch
from panorgan.preparation.pooling import MINORITY, capped, weighted_median
from panorgan.preparation.sampling import sliced_axis

INTERSECTION, UNION = "attention/intersection", "attention/union"
DEPTH, TOKENS = "attention/depth", "attention/tokens"
GATE, ENTROPY = "attention/gate", "attention/entropy"
ATTRIBUTION = "attribution/"
LARGEST_SHARE = "attribution/largest_share"
_TRANSFORMER, _LAST_NORM = "transformer.", "transformer.norm.weight"
_PAPER = {TOKENS: 256, DEPTH: 40}
_MOST_TOKENS = 4096
_OFF = {"regularisation": False, "dynamic_aggregation": False}


def _containment(
    attention: torch.Tensor, intersection: torch.Tensor, union: torch.Tensor, alpha: float
) -> torch.Tensor:
    return containment(attention, intersection, union, alpha).mean(1)


def _sent(updates: Updates, key: str, site: str) -> torch.Tensor:
    return unpacked(updates.tensor(site, key)).clamp_(0, 1)  # attention lies in this range


@register("fediod", config=FedIODConfig)
class FedIOD(Method):
    """A multi-decoder network with inter-organ attention that sites share, averaged head by head."""

    group: ClassVar[str] = "systems"
    paper: ClassVar[str] = (
        "Wan, Yan and Yu, FedIOD: Federated multi-organ segmentation from partial labels by exploring inter-organ "
        "dependency"
    )
    equations: ClassVar[Mapping[str, str]] = {
        "eqs. 1, 2": "`inter_organ`: `mean_attention`, `token_weights`",
        "eqs. 3, 4": "`ScanInspector.maps_of`, `attention_maps.resample_depth`",
        "eqs. 5, 6": "`ScanInspector.maps`: `attention_maps.ScanMaps`",
        "eqs. 7 to 9": "`Server.aggregate`: `attention_maps.fuse`",
        "eqs. 10 to 14": "`Site.containment`: `attention_containment`",
        "eqs. 15, 16": "`Server.aggregate`: the mean, by n_k",
        "eq. 17": "`ScanInspector.attribution_of`: `head_attribution.head_attribution`",
        "eq. 18": "`ScanInspector.importance`: `head_attribution.largest_entries`, `head_importance`",
        "eqs. 19, 20": "`Server.weight`: `head_attribution.head_weights`",
    }
    recipe: ClassVar[Mapping[str, object]] = {
        "method.server_step": 1,
        "network.dimensions": 2,
        "network.features": [16, 32, 64, 128, 256],
        "training.rounds": 500,
        "training.local_epochs": 1,
        "training.optimizer.name": "sgd",
        "training.optimizer.learning_rate": 0.01,
        "training.optimizer.momentum": 0.9,
        "training.sampling.patch_size": [256, 256, 1],
        "training.sampling.batch_size": 8,
    }
    organs: ClassVar[OrganParts] = "decoders"
    numbers: ClassVar[Mapping[str, str]] = {
        **LOSS_IN_PARTS,
        "attention/*": "how attention behaves: the largest factor by which it multiplies a skip connection (`gate`), "
        "and how evenly heads attend (`entropy`, 1 for all places alike, 0 for a single one); in the first round "
        "how many slices the site's scans have (`depth`, the median), and how many places a patch has (`tokens`)",
        f"{ATTRIBUTION}*": "how much each attention head contributes to the site's own organs",
    }
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        DEPTH: (1.0, 100_000.0),
        TOKENS: (1.0, float(_MOST_TOKENS)),
        f"{ATTRIBUTION}*": (-1000.0, 1000.0),  # of a probability: all heads of a scan add up to at most 1
    }
    tensors: ClassVar[Mapping[str, str]] = {
        "attention/*": "for every pair of places on a coarse grid over a slice (16 × 16 in the paper), how much the "
        "network attends from one to the other: minimum and maximum over the site's best scans (with fewer than "
        "eight training scans that is a single one, unless `map_scans` is raised)."
    }
    report_section: ClassVar[str] = "panorgan.methods.fediod.report"
    ablation: ClassVar[tuple[AblationRow, ...]] = (  # table VIII, in-federation: mean Dice in percent
        AblationRow("Enc+Dec", (), {"transformer": False, **_OFF}, paper="87.16"),
        AblationRow("+T", ("T",), _OFF, paper="87.50"),
        AblationRow("+Reg", ("T", "Reg"), {"dynamic_aggregation": False}, paper="88.11"),
        AblationRow("+DA", ("T", "Reg", "DA"), paper="88.10"),
    )
    config: FedIODConfig

    def build_network(
        self, settings: UNetSettings, federation: Federation, site: str | None = None
    ) -> InterOrganNetwork:
        """As in `multidecoder`: a site has its own organs' decoders, the federation those of all labelled organs."""
        settings = self.network_settings(settings)
        inter_organ = InterOrganSettings(
            **{name: getattr(self.config, name) for name in InterOrganSettings.model_fields}
        )
        if site is not None and self.config.organ_parts == "owners":
            return InterOrganNetwork(Vocabulary(federation.organs_of(site)), settings, None, inter_organ)
        return InterOrganNetwork(federation.vocabulary, settings, federation.labelled_organs(), inter_organ)

    def module_starts(self, rounds: int) -> Mapping[str, int]:
        """The rounds in which Reg and DA begin: not before attention is meaningful."""
        return self.config.module_starts(rounds)

    def rate_factors(self, optimizer: str) -> Mapping[str, float]:
        """The transformer has its own rate."""
        return {_TRANSFORMER: self.config.transformer_factor(optimizer)}

    class Site(SiteRule):
        """Trains on the own organs with attention regularised by the fused maps; then inspects the best scans."""

        config: FedIODConfig
        model: InterOrganNetwork

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            self.fused: dict[str, torch.Tensor] = {}
            """Î and Û [D̄, n, n] of this round, by key; empty while nothing is regularised."""
            self.targets: SliceTargets | None = None
            """The fused maps for slices of the site's own scans."""
            self.answer = Payload()
            """The results of this round's inspection of the best scans."""
            self.logged: dict[str, torch.Tensor] = {}
            self.inspector = ScanInspector(self.model, self.tools, self.own_organs, self.config.attribution_steps)
            self._refuse_too_many_tokens()

        def _refuse_too_many_tokens(self) -> None:
            """A head's map has as many numbers as tokens squared: thousands of tokens exhaust any memory."""
            if self.config.transformer and (tokens := self.inspector.tokens()) > _MOST_TOKENS:
                raise ConfigError(
                    f"FedIOD would relate {tokens} places to each other, which takes {tokens**2:,} numbers per head.",
                    code="too-many-tokens",
                    where="network.features, training.sampling.patch_size",
                    why=f"the deepest level of the network has that many places in a patch; at most {_MOST_TOKENS} are "
                    "allowed, and the paper has 256",
                    fix="Add levels to network.features (each halves every axis), or make patches smaller.",
                )

        def before_round(self) -> None:
            """Load the weights, and the maps fused over all sites."""
            super().before_round()
            tensors = self.received.tensors
            keys = (INTERSECTION, UNION) if self.config.regularises(self.round_info) and UNION in tensors else ()
            self.fused = {key: unpacked(tensors[key]) for key in keys}
            axis = sliced_axis(self.tools.patch_size)
            self.targets = None
            if self.fused and axis is not None:
                self.targets = SliceTargets(list(self.fused.values()), (c.shape[axis] for c in self.tools.cases))

        # -- a training step

        def step(self, batch: Batch) -> dict[str, torch.Tensor]:
            """Take one optimiser step; logs the terms of the loss and numbers about the attention too."""
            self.logged = {}
            return {**super().step(batch), **self.logged}

        def loss(self, batch: Batch) -> torch.Tensor:
            """Dice + cross-entropy on annotated structures; once there are fused maps, plus eqs. 10 and 11."""
            if not self.fused and not self.config.has_gate:  # maps are not needed: attention is faster without them
                return super().loss(batch)
            with self.model.record_attention(self.containment(batch) if self.fused else NUMBERS_ONLY) as seen:
                loss = super().loss(batch)
            self.logged = dict(zip((GATE, ENTROPY), seen.numbers, strict=True))
            if not self.fused:
                return loss
            parts = seen.loss
            missing, outside = parts.detach()
            self.logged |= {"loss/intersection": missing, "loss/union": outside}
            return torch.add(loss, parts.sum(), alpha=self.config.regularisation_weight)

        def containment(self, batch: Batch) -> AttentionLoss:
            """The loss of a batch's maps Ā [B, n, n]: L_I and L_U, [2], means over the batch (eqs. 13, 14)."""
            if self.targets is not None and batch.slices is not None and batch.depths is not None:
                intersection, union = self.targets(batch.slices, batch.depths)
            else:  # 3D patches: one map for all
                intersection, union = (
                    self.fused[key][:1].expand(len(batch.image), -1, -1) for key in (INTERSECTION, UNION)
                )
            alpha = self.config.alpha or ALPHA * union.shape[-1] / _PAPER[TOKENS]
            return AttentionLoss(("containment", alpha), partial(_containment, alpha=alpha), (intersection, union))

        # -- after training

        def after_round(self) -> None:
            """Segment every training scan; compute maps of the best (eqs. 3 to 6), attribute heads (eqs. 17, 18)."""
            depth = int(self.received.scalars.get(DEPTH, 0))
            maps_travel = depth > 0 and self.config.maps_travel(self.round_info)
            judged = self.config.sends_attributions(self.round_info)
            tensors, numbers = dict[str, torch.Tensor](), dict[str, float]()
            if self.config.regularisation and depth == 0:
                numbers |= {DEPTH: self.inspector.median_depth(), TOKENS: float(self.inspector.tokens())}
            if maps_travel or judged:
                self.model.eval()
                losses = self.inspector.dice_losses()
                if maps_travel:
                    tensors = self._maps(best_scans(losses, self.config.map_scans), depth)
                if judged:
                    numbers |= self._importance(best_scans(losses, self.config.attribution_scans))
                self.model.train()
            self.answer, self.fused, self.targets = Payload(tensors, numbers), {}, None

        def _maps(self, scans: Sequence[str], depth: int) -> dict[str, torch.Tensor]:
            """The maps of eqs. 5 and 6, packed for sending; empty if no scan was segmented at all."""
            found = self.inspector.maps(scans, depth)
            return {INTERSECTION: packed(found.intersection), UNION: packed(found.union)} if found.scans else {}

        def _importance(self, scans: Sequence[str]) -> dict[str, float]:
            """Eq. 18, by the name of the attention head."""
            rows = self.inspector.importance(scans)
            return {f"{ATTRIBUTION}{i}.{j}": value for i, row in enumerate(rows) for j, value in enumerate(row)}

        def update(self) -> Payload:
            """The model, and the results of the inspection."""
            whole = super().update()
            return Payload({**whole.tensors, **self.answer.tensors}, {**whole.scalars, **self.answer.scalars})

    class Server(ServerRule):
        """The mean over the sites that sent a key, weighted by attribution for attention heads; and the fused maps."""

        config: FedIODConfig

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            self.agreed: dict[str, float] = {}
            """D̄ and the number of tokens, once sites have reported them."""
            self.fused: dict[str, torch.Tensor] = {}
            """Î and Û as they travel, by key: of the last round with maps."""
            self.importance: dict[str, dict[str, float]] = {}
            """HA (eq. 18) by site and head, from each site's last report."""
            self.head_shares: Mapping[str, Mapping[str, float]] = {}
            """λ (eq. 19) of this round by head and site."""
            self._refuse_an_older_network()

        def _refuse_an_older_network(self) -> None:
            """Weights of a network without the last normalisation do not fit any network built today."""
            if any(head_of_key(key) is not None for key in self.weights) and _LAST_NORM not in self.weights:
                raise RunError(
                    "This FedIOD run was begun with an older panorgan version, and cannot be continued with this one.",
                    code="run-of-older-version",
                    why="its transformer has no last normalisation, and its gate was another one",
                    fix="Finish it with the version that began it, or start a new run.",
                )

        def broadcast(self, site: str) -> Payload:
            """The model, D̄ and, where they will be used, the fused maps."""
            whole = super().broadcast(site)
            maps = self.fused if self.config.regularises(self.round_info) else {}
            depth = {DEPTH: self.agreed[DEPTH]} if DEPTH in self.agreed else {}
            return Payload({**whole.tensors, **maps}, {**whole.scalars, **depth})

        def expects(self, site: str) -> Mapping[str, torch.Tensor]:
            """Maps may be included. Until sites have reported sizes, the paper's are assumed."""
            if not self.config.maps_travel(self.round_info):
                return super().expects(site)
            tokens, depth = (int({**_PAPER, **self.agreed}[name]) for name in (TOKENS, DEPTH))
            example = torch.empty(tokens, depth * tokens, dtype=torch.float16, device="meta")
            return {**super().expects(site), INTERSECTION: example, UNION: example}

        def aggregate(self, updates: Updates) -> None:
            """Set the common size, fuse the maps (eqs. 7 to 9), weight heads (eq. 19), average."""
            self._agree(updates)
            for key in (INTERSECTION, UNION):
                senders = [site for site in updates.sites if key in updates.keys(site)]
                if senders:
                    self.fused[key] = packed(fuse(partial(_sent, updates, key), senders, self.config.fusion_scale))
            for site in updates.sites:
                sent = {name: value for name, value in updates.scalars(site).items() if name.startswith(ATTRIBUTION)}
                if sent:
                    self.importance[site] = sent
            known = {site: self.importance.get(site, {}) for site in updates.sites}
            self.head_shares = head_weights(known, {site: self.weight(site, "") for site in updates.sites})
            super().aggregate(updates)

        def weight(self, site: str, key: str) -> float:
            """λ for the weights of a head (eq. 20), n_k for all others (eq. 16)."""
            head = head_of_key(key)
            shares = None if head is None else self.head_shares.get(f"{ATTRIBUTION}{head[0]}.{head[1]}")
            return super().weight(site, key) if shares is None else shares[site]

        def numbers(self) -> Scalars:
            """The largest λ of all heads and sites: near 1, a single site determines a head."""
            shares = [share for by_site in self.head_shares.values() for share in by_site.values()]
            return {LARGEST_SHARE: max(shares)} if shares else {}

        def _agree(self, updates: Updates) -> None:
            """Medians over sites, each counted once per case (half a case if none): D̄ of all scans reported."""
            if self.agreed:
                return
            for name in (DEPTH, TOKENS):
                reported = {site: updates.scalars(site).get(name, math.nan) for site in updates.sites}
                known = {site: value for site, value in reported.items() if value >= 1}
                cases = [float(self.federation.sites[site].train_cases) for site in known]
                if known:
                    self.agreed[name] = float(int(weighted_median(list(known.values()), capped(cases, MINORITY))))
            if DEPTH in self.agreed:
                self.agreed[DEPTH] = min(self.agreed[DEPTH], float(self.config.map_depth))

        def state(self) -> Payload:
            """The fused maps, their size, and each site's attributions."""
            kept = {f"{site}/{head}": value for site, heads in self.importance.items() for head, value in heads.items()}
            return Payload(self.fused, {**self.agreed, **kept})

        def load_state(self, state: Payload) -> None:
            """Restore them."""
            self.fused = dict(state.tensors)
            self.agreed = {name: state.scalars[name] for name in (DEPTH, TOKENS) if name in state.scalars}
            self.importance = {}
            for name, value in state.scalars.items():
                site, _, head = name.partition("/")
                if head.startswith(ATTRIBUTION):
                    self.importance.setdefault(site, {})[head] = value
