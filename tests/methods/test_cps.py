"""CPS*: the hard label and the loss by hand, one network as a teacher, without cross supervision FedAvg*."""

from __future__ import annotations

import math

import pytest
import torch
from federations import make_workers, run, same
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.losses.unified_label import chosen_label
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import SegmentationNetwork
from panorgan.preparation.batch import Batch

ORGANS = Vocabulary(["liver", "spleen"])
HERE = SiteInfo("here", 1, {"liver": 1})
FEDERATION = Federation(ORGANS, {"here": HERE, "there": SiteInfo("there", 1, {"spleen": 1})})
TRAINING = {"rounds": 2, "validate_every": 0, "local_steps": 2, "optimizer": {"clip_norm": None}}


class Pair(SegmentationNetwork):
    """Two networks that answer with their logits, the same everywhere."""

    def __init__(self, *logits: tuple[float, float, float]) -> None:
        super().__init__(ORGANS, "softmax")
        self.logits = nn.Parameter(torch.tensor(logits))

    def both(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.logits.view(2, 1, 3, 1).expand(-1, len(image), -1, image.shape[-1])
        return first, second


def batch(liver: bool = False, teacher: float = 0.9) -> Batch:
    """One voxel, in the liver or not; a teacher says how probable the spleen is."""
    return Batch(
        image=torch.zeros(1, 1, 1),
        masks=torch.tensor([[[liver]]]),
        annotated=torch.tensor([[True]]),
        structures=("liver",),
        cases=("case",),
        soft_targets=torch.tensor([[[teacher]]]),
        soft_target_organs=("spleen",),
        soft_targets_valid=torch.tensor([[True]]),
    )


def bce(logits: tuple[float, float, float], label: int) -> float:
    """−log p of the label − Σ log(1 − p) of the others, as a mean over the channels."""
    total = sum(map(math.exp, logits))
    shares = [math.exp(x) / total for x in logits]
    return -sum(math.log(p if c == label else 1 - p) for c, p in enumerate(shares)) / 3


def test_a_hard_label_is_the_most_probable_channel_that_the_annotation_allows():
    scores = torch.tensor([[[1.0], [5.0], [2.0]]])
    assert chosen_label(scores, batch(liver=True), ORGANS).values.tolist() == [[1]]
    absent = chosen_label(scores, batch(liver=False), ORGANS)
    assert absent.values.tolist() == [[2]], "the liver is not here, however probable"
    assert absent.channels()[0, :, 0].tolist() == [False, False, True]
    low = chosen_label(torch.tensor([[[1.0], [5.0], [-2.0]]]), batch(), ORGANS)
    assert low.channels()[0, :, 0].tolist() == [True, False, False], "a network's background is no open question"


def test_the_loss_by_hand():
    """The teacher says spleen; the first network background, the second spleen."""
    first, second = (2.0, 9.0, 1.0), (0.0, 0.5, 1.5)
    model = Pair(first, second)
    method = find_method("cps")
    config = method.Config(dice_weight=0, ce_weight=1, cross_weight=0.25)
    rule = method.Site(config, HERE, FEDERATION, SiteTools(model, torch.optim.SGD(model.parameters(), 0.1)))
    rule.round_info, rule.received = RoundInfo("train", 1, 2), Payload({"logits": model.logits.detach().clone()})
    rule.before_round()
    rule.prepare(batch())
    cross = bce(first, 2) + bce(second, 0)
    assert rule.loss(batch()).item() == pytest.approx(bce(first, 2) + bce(second, 2) + 0.25 * cross, rel=1e-5)


def test_the_networks_begin_differently_and_the_first_predicts(tiny, tmp_path):
    experiment = tiny(method={"name": "cps"})
    network = experiment.build_method().build_network(experiment.network, FEDERATION)
    own = network.state_dict()
    assert not torch.equal(own["encoder.0.conv1.conv.weight"], own["twin.encoder.0.conv1.conv.weight"])
    image = torch.randn(1, 1, 16, 16, 16)
    first, second = network.both(image)
    assert torch.equal(network(image), first)
    assert not torch.equal(first, second)


def test_a_teacher_is_a_single_network(tiny, tmp_path):
    training = {**TRAINING, "rounds": 1}
    pair, plain = (run(tiny(method={"name": n}, training=training), tmp_path / n) for n in ("cps", "fedavg_pl"))
    for site in ("north", "south"):
        assert same(pair.tensor_store.get(f"teacher/{site}"), plain.tensor_store.get(f"teacher/{site}"))


@pytest.mark.parametrize(("weight", "equal"), [(0.0, True), (0.5, False)])
def test_without_cross_supervision_the_first_network_is_fedavg_on_pseudo_labels(tiny, tmp_path, weight, equal):
    """Bit for bit; the second is another run of the same."""
    pair = run(tiny(method={"name": "cps", "cross_weight": weight}, training=TRAINING), tmp_path / "cps").state.weights
    plain = run(tiny(method={"name": "fedavg_pl"}, training=TRAINING), tmp_path / "plain").state.weights
    first = {key: value for key, value in pair.items() if not key.startswith("twin.")}
    assert same(first, dict(plain)) == equal
    assert {key.removeprefix("twin.") for key in pair if key.startswith("twin.")} == plain.keys()


def test_the_twin_is_averaged_too(tiny, tmp_path):
    experiment = tiny(method={"name": "cps"}, training={**TRAINING, "rounds": 1})
    workers = make_workers(experiment, tmp_path)
    assert set(workers) == {"north", "south"}
    coordinator = run(experiment, tmp_path / "run")
    server = coordinator.rule
    keys = {key for key in server.expects("north") if key.startswith("twin.")}
    assert keys
    assert not [key for key in server.expects("north") if key.startswith("teacher/twin.")]
