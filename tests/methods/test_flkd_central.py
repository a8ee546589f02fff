"""FLKD in one place (eq. 11): a second half-step holds what the batch does not label."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from federations import ALL, run, same
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.federation.events import read_events
from panorgan.methods.base import SiteTools
from panorgan.methods.flkd_central import FLKDCentral, FLKDCentralConfig
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.networks import UNetSettings
from panorgan.networks.organ_parts import group_of_key
from panorgan.preparation.batch import Batch

ORGANS = ("liver", "spleen", "pancreas")
TRAINING = {"rounds": 2, "validate_every": 0, "local_steps": 2}


def make_rule(rate: float, kd_weight: float = 1.0, norm: str = "instance") -> FLKDCentral.Site:
    """A fresh rule with the same first weights every time, and plain gradient steps."""
    torch.manual_seed(0)
    config = FLKDCentralConfig(kd_weight=kd_weight)
    facts = SiteInfo("pooled", 3, dict.fromkeys(ORGANS, 1))
    federation = Federation(Vocabulary(ORGANS), {"pooled": facts})
    settings = UNetSettings(features=(4, 8), norm=norm, organ_prior=None)
    model = FLKDCentral(config).build_network(settings, federation, "pooled")
    return FLKDCentral.Site(config, facts, federation, SiteTools(model, torch.optim.SGD(model.parameters(), rate)))


def make_batch(annotated: list[list[bool]]) -> Batch:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(len(annotated), 1, 8, 8, 8, generator=generator)
    masks = torch.rand(len(annotated), 3, 8, 8, 8, generator=generator) > 0.7
    return Batch(image, masks, torch.tensor(annotated), ORGANS, ("case",) * len(annotated))


LIVER_ONLY = make_batch([[True, False, False]] * 2)


def said(rule: FLKDCentral.Site, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        return rule.model(batch.image).sigmoid()


def gradients(rule: FLKDCentral.Site) -> dict[str, float]:
    """Largest gradient of each part after the last half-step; parts are `None` (shared) and organs."""
    largest: dict[str | None, float] = {}
    for name, parameter in rule.model.named_parameters():
        value = 0.0 if parameter.grad is None else parameter.grad.abs().max().item()
        group = group_of_key(name)
        largest[group] = max(largest.get(group, 0.0), value)
    return largest


def test_the_loss_by_hand():
    """−1/(N_V·N_L̄) Σ (p log q + (1 − p) log(1 − q)), p before the step and q after it, over spleen and pancreas."""
    rule, plain = make_rule(0.1), make_rule(0.1, kd_weight=0)
    p = said(plain, LIVER_ONLY)[:, 1:].double()
    plain.step(LIVER_ONLY)
    q = said(plain, LIVER_ONLY)[:, 1:].double()
    expected = -(p * q.log() + (1 - p) * (1 - q).log()).mean()
    numbers = rule.step(LIVER_ONLY)
    assert numbers["loss/kd"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert set(numbers) == {"loss", "loss/kd"}


def test_a_model_that_did_not_move_has_nothing_to_take_back():
    """Learning rate 0: the second gradient is 0 everywhere, though the loss is the entropy of the predictions."""
    rule = make_rule(0.0)
    p = said(rule, LIVER_ONLY)[:, 1:].double()
    numbers = rule.step(LIVER_ONLY)
    assert max(gradients(rule).values()) < 1e-7
    entropy = -(p * p.log() + (1 - p) * (1 - p).log()).mean()
    assert numbers["loss/kd"].item() == pytest.approx(entropy.item(), rel=1e-5)
    first = make_rule(0.0, kd_weight=0)
    first.step(LIVER_ONLY)
    assert gradients(first)[None] > 1e-3, "the first half-step did pull"


def test_predictions_of_absent_organs_are_pulled_back():
    """How far one step leads them away: less with the second half-step, and less the more it weighs."""
    distances = []
    for kd_weight in (0.0, 1.0, 10.0):
        rule = make_rule(0.1, kd_weight)
        before = said(rule, LIVER_ONLY)
        rule.step(LIVER_ONLY)
        distances.append((said(rule, LIVER_ONLY) - before)[:, 1:].square().mean().sqrt().item())
    free, held, held_firmly = distances
    assert 0 < held_firmly < 0.8 * held < 0.8 * free
    # The liver itself is free to learn.
    assert (said(rule, LIVER_ONLY) - before)[:, 0].abs().max() > 1e-3


def test_what_any_sample_of_the_batch_labels_is_not_held():
    """One sample labels the liver, the other the spleen: only the pancreas is absent from the batch."""
    rule = make_rule(0.1)
    rule.step(make_batch([[True, False, False], [False, True, False]]))
    pulled = gradients(rule)
    assert pulled["pancreas"] > 0
    assert pulled["liver"] == pulled["spleen"] == 0
    rule = make_rule(0.1)
    rule.step(LIVER_ONLY)
    pulled = gradients(rule)
    assert pulled["liver"] == 0
    assert min(pulled["spleen"], pulled["pancreas"]) > 0


def test_where_everything_is_labelled_there_is_no_second_half_step():
    """Not even one on a gradient of 0, which momentum would turn into a movement."""
    batch = make_batch([[True, True, False], [False, False, True]])
    weights = []
    for kd_weight in (0.0, 1.0):
        rule = make_rule(0.1, kd_weight)
        rule.tools.optimizer = torch.optim.AdamW(rule.model.parameters(), 0.01)
        numbers = [rule.step(batch) for _ in range(3)]
        weights.append(dict(rule.model.state_dict()))
    assert same(*weights)
    assert all(number["loss/kd"].item() == 0 for number in numbers)


@pytest.mark.parametrize(("batch", "passes"), [(LIVER_ONLY, 2), (make_batch([[True] * 3]), 1)])
def test_two_passes_at_most(batch, passes):
    """The pass that gives the loss also says what the model predicts before the step."""
    rule = make_rule(0.1, norm="batch")
    rule.step(batch)
    seen = {m.num_batches_tracked.item() for m in rule.model.modules() if isinstance(m, nn.BatchNorm3d)}
    assert seen == {passes}


def test_lower_precision():
    rule = make_rule(0.1)
    rule.tools = replace(rule.tools, autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    numbers, exact = rule.step(LIVER_ONLY), make_rule(0.1).step(LIVER_ONLY)
    assert all(torch.isfinite(value) for value in numbers.values())
    assert numbers["loss/kd"].item() == pytest.approx(exact["loss/kd"].item(), rel=0.05)


# -- reductions, on the tiny federation ------------------------------------------------------------------------------


def test_without_distillation_it_is_central_training_with_heads(tiny, tmp_path):
    central = run(
        tiny(method={"name": "central_partial"}, network={"organs": "heads"}, training=TRAINING), tmp_path / "central"
    )
    plain = run(tiny(method={"name": "flkd_central", "kd_weight": 0}, training=TRAINING), tmp_path / "plain")
    held = run(tiny(method={"name": "flkd_central"}, training=TRAINING), tmp_path / "held")
    assert same(plain.state.weights, central.state.weights)
    assert not same(held.state.weights, central.state.weights)
    (last,) = [
        event.facts["sites"]["pooled"]
        for event in read_events(tmp_path / "held" / "events.jsonl")
        if event.kind == "round" and event.facts["round"] == 2
    ]
    assert last["loss/kd"] > 0


def test_when_every_case_labels_everything_distillation_changes_nothing(tiny, tmp_path):
    """A training site may be called `pooled` as well: pooled methods know one participant only."""
    phantom = {
        "sites": [
            {"name": "pooled", "annotated": ALL, "cases": 3, "spacing_mm": [14, 14, 14]},
            {"name": "south", "annotated": ALL, "cases": 3, "spacing_mm": [14, 14, 14]},
        ]
    }
    outcomes = [
        run(
            tiny(phantom=phantom, method={"name": "flkd_central", "kd_weight": w}, training=TRAINING), tmp_path / str(w)
        )
        for w in (0, 1)
    ]
    assert list(outcomes[0].federation.sites) == ["pooled"]
    assert outcomes[0].federation.sites["pooled"].train_cases == 2
    assert same(outcomes[0].state.weights, outcomes[1].state.weights)
