"""What UFPS and its starred baselines share: who labels what, stored teachers, and teachers that never come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from federations import run

from panorgan.errors import AnatomyError
from panorgan.federation import site as site_module
from panorgan.federation.events import read_events
from panorgan.losses.unified_label import UnifiedLabel, allowed_channels, without_own_teachers
from panorgan.methods.registry import methods
from panorgan.methods.shared.pseudo_labels import PseudoLabelConfig, PseudoLabelSite
from panorgan.networks import UNetSettings
from panorgan.preparation import teacher_predictions as predictions_module
from panorgan.preparation.batch import Batch
from panorgan.preparation.store import PREDICTION

TRAINING: dict[str, Any] = {"rounds": 1, "validate_every": 0, "local_steps": 3}
FedAvgPL, FedProxPL = methods()["fedavg_pl"], methods()["fedprox_pl"]
STARRED = ("fedavg_pl", "fedprox_pl", "fedasam_pl", "dodnet_pl", "cps", "mskd", "ufps")


@dataclass
class Step:
    """A training step: what came, what it was taught with, what the network said and how wrong that was."""

    site: str
    round: int
    batch: Batch
    label: UnifiedLabel
    logits: torch.Tensor
    loss: float


@pytest.fixture
def steps(monkeypatch) -> list[Step]:
    """Of all starred methods; for one with two passes the last counts."""
    taken: list[Step] = []
    prepare, losses = PseudoLabelSite.prepare, PseudoLabelSite.sample_losses

    def watched_losses(self, logits):
        found = losses(self, logits)
        taken[-1].label, taken[-1].logits, taken[-1].loss = (
            self.label,
            logits.detach().double(),
            float(found.detach().mean()),
        )
        return found

    def watched(prepare):
        def prepared(self, batch):
            taken.append(Step(self.facts.name, self.round_info.round, batch, None, None, 0.0))
            prepare(self, batch)

        return prepared

    monkeypatch.setattr(PseudoLabelSite, "sample_losses", watched_losses)
    for kind in (PseudoLabelSite, methods()["ufps"].Site):
        monkeypatch.setattr(kind, "prepare", watched(prepare if kind is PseudoLabelSite else kind.prepare))
    return taken


def reported(folder, kind: str) -> list[dict[str, Any]]:
    return [event.facts for event in read_events(folder / "events.jsonl") if event.kind == kind]


# -- what they share -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STARRED)
def test_the_network_has_exclusive_channels_whatever_the_experiment_says(name):
    kind = methods()[name]
    settings = kind(kind.Config()).network_settings(UNetSettings(organs="heads", activation="sigmoid"))
    assert (settings.organs, settings.activation) == ("channels", "softmax")


@pytest.mark.parametrize("name", STARRED)
def test_an_overlap_priority_that_does_not_fit_is_refused_before_teachers_are_trained(tiny, tmp_path, name):
    """The paper's own order says kidney, where a vocabulary may say kidney_left and kidney_right."""
    with pytest.raises(AnatomyError, match="not in the vocabulary: kidney") as error:
        run(tiny(method={"name": name, "larger_first": ["liver", "kidney"]}, training=TRAINING), tmp_path)
    assert error.value.where == "larger_first"
    assert not (tmp_path / "events.jsonl").exists() or not reported(tmp_path, "round")


def test_teachers_come_first():
    found = [(s.name, s.rounds, s.local_steps, s.validate) for s in FedAvgPL(PseudoLabelConfig(pretrain=0.3)).stages(5)]
    assert found == [("pretrain", 2, None, False), ("exchange", 1, 0, False), ("train", 5, None, True)]
    assert FedAvgPL(PseudoLabelConfig(pretrain=0.01)).stages(5)[0].rounds == 1


def test_the_proximal_term_is_added_in_training_alone(tiny, tmp_path, monkeypatch):
    """μ/2·‖w − w₀‖²: nothing in the first step of a round, more and more after it; teachers are trained without."""
    terms: list[tuple[str, float, float]] = []
    loss, plain = FedProxPL.Site.loss, PseudoLabelSite.loss
    monkeypatch.setattr(PseudoLabelSite, "loss", lambda self, batch: noted(self, plain(self, batch)))

    def noted(self, value):
        self.plain_loss = value
        return value

    def watched(self, batch):
        whole = loss(self, batch)
        weights = dict(self.model.named_parameters())
        away = sum(
            float((w.detach().double() - self.received.tensors[k].double()).square().sum())
            for k, w in weights.items()
            if k in self.received.tensors
        )
        terms.append((self.round_info.stage, float((whole - self.plain_loss).detach()), away))
        return whole

    monkeypatch.setattr(FedProxPL.Site, "loss", watched)
    run(tiny(method={"name": "fedprox_pl", "mu": 3.0}, training=TRAINING), tmp_path)
    assert [stage for stage, _, _ in terms] == ["pretrain"] * 6 + ["train"] * 6
    assert [added for _, added, _ in terms[:6]] == [0.0] * 6
    assert [added for _, added, _ in terms[6:]] == pytest.approx([1.5 * away for _, _, away in terms[6:]], rel=1e-3)
    assert terms[6][1] == 0.0 < terms[7][1]


@pytest.mark.parametrize("name", STARRED)
def test_between_rounds_a_label_takes_no_room(tiny, tmp_path, steps, monkeypatch, name):
    """Many simulated sites share one device, and a label holds a float per voxel and channel, twice."""
    put_away, kept = site_module.SiteWorker._put_away, []

    def watched(self, rule):
        put_away(self, rule)
        kept.append(any(isinstance(value, UnifiedLabel) for value in vars(rule).values()))

    monkeypatch.setattr(site_module.SiteWorker, "_put_away", watched)
    run(tiny(method={"name": name}, training=TRAINING), tmp_path)
    assert any("target_masks" in vars(step.label) for step in steps)
    assert not any(kept)


# -- stored and recomputed teachers ----------------------------------------------------------------------------------

MOVED = {"rotation_degrees": 30.0, "scale": 0.3, "geometry_probability": 1.0, "mirror_axes": [1, 2]}


def waves(network, image: torch.Tensor, settings) -> torch.Tensor:
    """Teachers that claim half of everything, in waves: young ones would claim next to nothing."""
    place = torch.stack(torch.meshgrid(*(torch.arange(float(n)) for n in image.shape), indexing="ij"))
    turns = torch.stack([place[c % 3] * 0.7 + place[(c + 1) % 3] * 0.4 + c for c in range(len(network.channels))])
    return 0.5 + 0.5 * turns.sin()


def with_still_weights(tiny, folder, steps: list[Step], monkeypatch, cache, augment, **method: Any) -> list[Step]:
    """Nothing is learned in training, so that a later step differs for no other reason than its own label."""
    for path in cache.rglob(f"{PREDICTION}*"):
        path.unlink()
    apply = PseudoLabelSite.apply_gradients
    steps.clear()
    with monkeypatch.context() as patch:
        patch.setattr(PseudoLabelSite, "apply_gradients", lambda self: self.in_training or apply(self))
        patch.setattr(site_module, "predict_probabilities", waves)
        training = {**TRAINING, "augment": augment}
        run(tiny(method={"name": "fedavg_pl", **method}, training=training), folder)
    return list(steps)


def test_stored_teachers_give_the_same_loss_where_nothing_is_interpolated(tiny, tmp_path, steps, monkeypatch, cache):
    """A label asks whether p > ½ only. round(255 p) is at least 128 from p = ½ on: 8 bit lose nothing, bit for bit."""
    stored = with_still_weights(tiny, tmp_path / "stored", steps, monkeypatch, cache, None)
    fresh = with_still_weights(tiny, tmp_path / "fresh", steps, monkeypatch, cache, None, teacher_cache=False)
    assert len(stored) == len(fresh) == 6
    assert any(not torch.equal(a.batch.soft_targets, b.batch.soft_targets) for a, b in zip(stored, fresh, strict=True))
    for one, other in zip(stored, fresh, strict=True):
        claimed = {0, 1, 2, 3, 4} if one.site == "north" else {0, 1}
        assert claimed <= {value.item() for value in one.label.values.unique()}
        assert torch.equal(one.label.values, other.label.values)
        assert one.loss == other.loss


@pytest.mark.parametrize("bits", [8, 3])
def test_moved_teachers_give_the_same_loss_within_quantisation(tiny, tmp_path, steps, monkeypatch, cache, bits):
    """Interpolated from levels, a probability is off by at most 1/510. So labels may differ only where a teacher says
    ½ ± 1/510; there a target of two channels changes, and each is worth |log p − log(1 − p)| of cross-entropy:

    |Δ loss| ≤ mean over samples of Σ over such voxels of 2·max_c |log p_c − log(1 − p_c)| / (voxels · channels)

    With three bits labels differ elsewhere too.
    """
    monkeypatch.setattr(predictions_module, "LEVELS", 2**bits - 1)
    only_bce = {"dice_weight": 0.0, "ce_weight": 1.0}
    runs = [
        with_still_weights(
            tiny, tmp_path / str(cached), steps, monkeypatch, cache, MOVED, teacher_cache=cached, **only_bce
        )
        for cached in (True, False)
    ]
    elsewhere = here = 0
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one.logits, other.logits)
        known = other.batch.soft_targets_valid.view(*other.batch.soft_targets_valid.shape, 1, 1, 1)
        doubtful = (((other.batch.soft_targets - 0.5).abs() <= 1 / 510 + 1e-6) & known).any(1)
        changed = one.label.values != other.label.values
        elsewhere += int((changed & ~doubtful).sum())
        here += int((changed & doubtful).sum())
        if bits == 8:
            p = one.logits.softmax(1)
            worth = 2 * (p.log() - (1 - p).log()).abs().amax(1)
            bound = float((worth * doubtful).sum() / one.logits.numel())
            assert abs(one.loss - other.loss) <= bound + 1e-6
            assert (one.loss != other.loss) == bool(changed.any())
    assert here > 0
    assert (elsewhere == 0) == (bits == 8)


# -- overlapping organs, a union, and a teacher that never comes -----------------------------------------------------

ORGANS = ["liver", "spleen", "kidney_left", "kidney_right"]
OVERLAPPING = {
    "sites": [
        {"name": "north", "annotated": ["liver", "spleen"], "cases": 3, "spacing_mm": [12, 12, 12]},
        {"name": "south", "annotated": ["spleen", "kidney"], "cases": 3, "spacing_mm": [12, 12, 12]},
        {"name": "west", "annotated": ["kidney_left"], "cases": 3, "spacing_mm": [12, 12, 12]},
    ]
}
THREE_ROUNDS = {**TRAINING, "rounds": 3, "local_steps": 2}
LACKS = {"north": "kidney_left kidney_right", "south": "liver", "west": "liver kidney_right spleen"}


def target_of(step: Step, organ: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a label counts for an organ's channel, and where it does for the background's; both [B, *S]."""
    counted = step.label.targets()[1]
    return counted[:, ORGANS.index(organ) + 1], counted[:, 0]


@pytest.mark.parametrize("name", ["fedavg_pl", "ufps"])
def test_sites_with_overlapping_organs_and_a_union(tiny, tmp_path, steps, name):
    """Every case gets labels for what it does not label itself, and ground truth is never overwritten."""
    method = {"name": name, "pretrain": 0.3, **({"main_teacher_dice": 0} if name == "ufps" else {})}
    experiment = tiny(method=method, phantom=OVERLAPPING, training=THREE_ROUNDS)
    coordinator = run(experiment, tmp_path)
    assert coordinator.finished
    assert not reported(tmp_path, "notice")
    assert not reported(tmp_path, "refused")
    assert {step.round for step in steps} == {1, 2, 3}
    for step in steps:
        lacking = set(LACKS[step.site].split())
        assert set(step.batch.soft_target_organs) == (set(ORGANS) if name == "ufps" else lacking), (
            "UFPS's eq. 6 hears all"
        )
        heard = without_own_teachers(step.batch, coordinator.federation.vocabulary)
        assert {
            o for o, known in zip(heard.soft_target_organs, heard.soft_targets_valid[0], strict=True) if known
        } == lacking
        allowed = allowed_channels(step.batch, coordinator.federation.vocabulary)
        sure = step.label.possible.sum(2) == 1
        values = step.label.values
        for sample in range(len(values)):
            for value in values[sample].unique().tolist():
                if value <= len(ORGANS) and sure[sample, value]:
                    assert allowed[sample, value][values[sample] == value].all()
        if step.site == "south":  # its own mask says kidney, and not of which side; no other site knows it better
            (kidney,) = (place for place, s in enumerate(step.batch.structures) if s == "kidney")
            inside = step.batch.masks[:, kidney]
            assert not step.label.targets()[0][:, 0][inside].any(), "a kidney is no background"
        assert step.loss > 0


@pytest.mark.parametrize("name", ["fedavg_pl", "ufps"])
def test_an_organ_without_a_teacher_is_not_taught_as_background(tiny, tmp_path, steps, monkeypatch, name):
    """North diverges while it trains alone, and has no teacher to send: no other site knows a liver when it comes.

    Elsewhere neither the background nor the liver counts where the label is unknown. North goes on teaching it.
    """
    loss = PseudoLabelSite.loss

    def poisoned(self, batch):
        broken = self.facts.name == "north" and self.round_info.stage == "pretrain"
        return loss(self, batch) * (float("nan") if broken else 1.0)

    monkeypatch.setattr(PseudoLabelSite, "loss", poisoned)
    method = {"name": name, "pretrain": 0.3, **({"main_teacher": False} if name == "ufps" else {})}
    experiment = tiny(method=method, phantom=OVERLAPPING, training=THREE_ROUNDS)
    coordinator = run(experiment, tmp_path)
    assert coordinator.finished
    assert coordinator.tensor_store.names() == ("teacher/south", "teacher/west")
    (notice,) = reported(tmp_path, "notice")
    assert notice["code"] == "no-teacher"
    assert "No teacher knows liver." in notice["text"]
    rounds = [facts for facts in reported(tmp_path, "round") if facts["stage"] == "train"]
    assert [sorted(facts["sites"]) for facts in rounds] == [["north", "south", "west"]] * 3
    for step in steps:
        liver, background = target_of(step, "liver")
        nothing = step.label.values == 0
        assert nothing.any()
        if step.site == "north":
            assert liver.all()
            assert background[nothing].all()
        else:
            assert "liver" not in step.batch.soft_target_organs
            assert not liver[nothing].any()
            assert not background[nothing].any()
            organ = (step.label.values > 0) & (step.label.values <= len(ORGANS))
            assert liver[organ].all(), "what is another organ is no liver"
