"""The plain methods: closed-form pieces, reductions, and that each of them learns."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
from refusing import refused
from torch import nn

import panorgan.methods
from panorgan.anatomy import Vocabulary
from panorgan.config import Experiment
from panorgan.errors import ConfigError
from panorgan.methods.base import LOSS_IN_PARTS, Method, MethodConfig, ServerRule
from panorgan.methods.fedprox import squared_distance
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.methods.registry import find_method, methods, register
from panorgan.methods.solo import MergedMembers
from panorgan.networks import UNetSettings
from panorgan.networks.base import SegmentationNetwork
from panorgan.preparation.batch import Batch
from panorgan.workflows.execute import train

PLAIN = ("central_full", "central_naive", "central_partial", "fedavg", "fedprox", "solo")


def final_weights(experiment: Experiment, folder: Path) -> bytes:
    train(experiment, folder)
    return (folder / "model" / "model.safetensors").read_bytes()


def test_the_registry_finds_them_all():
    assert set(PLAIN) <= set(methods())
    with refused("unknown-method", ConfigError) as caught:
        find_method("fedprocks")
    assert "fedprox" in caught.value.why


def test_two_methods_cannot_share_a_name():
    class Impostor(Method):
        """Another FedAvg."""

    assert "fedavg" in methods()  # found, whichever test runs first
    with refused("duplicate-method", ConfigError):
        register("fedavg")(Impostor)


@pytest.mark.parametrize("declared", ["numbers", "tensors"])
@pytest.mark.parametrize("words", [("mine",), {"mine": "", "loss": "how bad"}, {"mine": " "}, {"mine": None}])
def test_a_method_that_does_not_explain_what_leaves_a_site_is_refused(declared, words):
    with refused("undescribed-payload", ConfigError) as caught:
        register("silent")(type("Silent", (Method,), {declared: words}))
    assert caught.value.where.endswith(f"Silent.{declared}")
    assert caught.value.why.endswith(": mine")
    assert "silent" not in methods()


def test_what_a_method_adds_stands_beside_what_every_method_sends():
    """And reads well: the parts of a loss directly after it."""
    assert list(Method.numbers) == ["loss", "cases"]
    assert list(LOSS_IN_PARTS) == ["loss", "loss/*", "cases"]
    for name, method in methods().items():
        assert Method.numbers.items() <= method.numbers.items(), name


@pytest.mark.parametrize("name", PLAIN)
def test_every_method_says_what_it_is_and_what_its_numbers_mean(name):
    method = methods()[name]
    assert inspect.getdoc(method)
    assert inspect.getmodule(method).__doc__
    assert all(field.description for field in method.Config.model_fields.values())


def test_methods_never_touch_files_devices_or_rounds():
    """The room's rule: formulas only. Checked on the source, so that it also holds for methods to come."""
    forbidden = {
        "pathlib",
        "os",
        "io",
        "json",
        "panorgan.federation",
        "panorgan.workflows",
        "panorgan.config",
        "panorgan.agreement",
    }
    for path in Path(panorgan.methods.__path__[0]).rglob("*.py"):
        # A section of the report, which alone imports it; descriptions that were written down, for `panorgan methods`.
        if path.name == "report.py" or path.parts[-2:] == ("about", "stored.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n in forbidden or n.startswith("panorgan.federation")], path


def test_squared_distance_by_hand():
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
        model.bias.copy_(torch.tensor([3.0]))
    anchor = {"weight": torch.tensor([[0.0, 4.0]]), "bias": torch.tensor([1.0])}
    distance = squared_distance(model, anchor)
    assert distance.item() == pytest.approx(1 + 4 + 4)
    distance.backward()
    assert model.weight.grad.tolist() == [[2.0, -4.0]]
    assert model.bias.grad.tolist() == [4.0]


def test_fedprox_adds_half_mu_times_the_distance(tiny, tmp_path):
    """On the first step w = w₀ and nothing is added; afterwards the loss grows by μ/2·‖w − w₀‖²."""
    from panorgan.federation.events import EventLog
    from panorgan.workflows.execute import build_workers
    from panorgan.workflows.prepare import prepare
    from panorgan.workflows.run import Run

    experiment = tiny(method={"name": "fedprox", "mu": 0.3})
    worker = build_workers(experiment, prepare(experiment), Run(tmp_path), torch.device("cpu"), EventLog())["north"]
    federation = Federation(Vocabulary(experiment.vocabulary), {"north": worker.facts()})
    rule = worker._ready_rule(federation)
    rule.received = type(rule.received)({k: v.clone() for k, v in rule.model.state_dict().items()})
    image = torch.randn(2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    batch = Batch(image, image[:, :1] > 0, torch.ones(2, 1, dtype=torch.bool), ("liver",), ("a", "b"))
    plain = rule.supervision(batch).mean()
    torch.testing.assert_close(rule.loss(batch), plain)
    with torch.no_grad():
        next(iter(rule.model.parameters())).view(-1)[0] += 2.0
    moved = rule.supervision(batch).mean()
    torch.testing.assert_close(rule.loss(batch), moved + 0.3 / 2 * 4.0)


def test_fedprox_without_mu_is_fedavg_bit_for_bit(tiny, tmp_path):
    fedavg = final_weights(tiny(), tmp_path / "fedavg")
    assert final_weights(tiny(method={"name": "fedprox", "mu": 0}), tmp_path / "mu0") == fedavg
    assert final_weights(tiny(method={"name": "fedprox", "mu": 1}), tmp_path / "mu1") != fedavg


EVERYTHING = ["liver", "spleen", "kidney_left", "kidney_right"]
ONE_SITE = {"sites": [{"name": "north", "annotated": EVERYTHING, "cases": 5, "spacing_mm": [12, 12, 12]}]}


def test_one_site_that_labels_everything_makes_all_of_them_plain_training(tiny, tmp_path):
    """One participant, everything annotated: federated, pooled, partial, naive and full are the same computation.

    (The pooled participant has another name and so draws other patches; giving it the site's name removes that.)
    """
    from panorgan.workflows import execute

    original, execute.POOLED = execute.POOLED, "north"
    try:
        outcomes = {
            name: final_weights(tiny(phantom=ONE_SITE, method={"name": name}), tmp_path / name)
            for name in ("fedavg", "central_partial", "central_naive", "central_full")
        }
    finally:
        execute.POOLED = original
    assert len(set(outcomes.values())) == 1


def test_equal_weights_when_asked(tiny):
    federation = Federation(
        Vocabulary(["liver"]), {"a": SiteInfo("a", 9, {"liver": 9}), "b": SiteInfo("b", 1, {"liver": 1})}
    )
    by_cases = ServerRule(MethodConfig(), federation, {})
    uniform = ServerRule(MethodConfig(weighting="uniform"), federation, {})
    assert [by_cases.weight(s, "k") for s in "ab"] == [9.0, 1.0]
    assert [uniform.weight(s, "k") for s in "ab"] == [1.0, 1.0]


class Fixed(SegmentationNetwork):
    """Answers with the logits it was given."""

    def __init__(self, organs: list[str], logits: list[float], activation: str = "softmax") -> None:
        super().__init__(Vocabulary(organs), activation)
        self.logits = torch.tensor(logits)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.logits.view(1, -1, 1).expand(1, -1, image.shape[-1])


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [
        ([3.0, 1.0], [2.0, 0.0, 0.5], "background"),  # both members say background
        ([1.0, 2.0], [2.0, 0.0, 0.5], "liver"),  # one member says organ: the other's background does not count
        ([1.0, 2.0], [0.0, 0.0, 2.5], "kidney_left"),  # both say organ: the surer one (odds 1 against 2.5)
    ],
)
def test_merging_members(first, second, winner):
    members = {"a": Fixed(["liver"], first), "b": Fixed(["spleen", "kidney_left"], second)}
    merged = MergedMembers(members, Vocabulary(["liver", "spleen", "kidney_left"]), UNetSettings())
    logits = merged(torch.zeros(1, 1, 2))
    assert merged.channels[int(logits[0, :, 0].argmax())] == winner


def test_a_single_member_is_unchanged_by_merging():
    member = Fixed(["liver", "spleen"], [0.3, -1.0, 2.0])
    merged = MergedMembers({"a": member}, Vocabulary(["liver", "spleen"]), UNetSettings())
    image = torch.zeros(1, 1, 2)
    torch.testing.assert_close(merged(image).softmax(1), member(image).softmax(1))


def test_an_organ_of_two_members_gets_their_mean_and_independent_logits_pass_through():
    members = {"a": Fixed(["liver"], [1.0], "sigmoid"), "b": Fixed(["liver", "spleen"], [3.0, -1.0], "sigmoid")}
    merged = MergedMembers(members, Vocabulary(["spleen", "liver"]), UNetSettings(activation="sigmoid"))
    assert merged(torch.zeros(1, 1, 1)).flatten().tolist() == [-1.0, 2.0]


def test_a_member_that_knows_only_a_union_does_not_blur_its_parts():
    """Site a saw `kidney` and cannot tell left from right; site c saw both sides. Only c is asked which is which."""
    members = {"a": Fixed(["kidney_left", "kidney_right"], [0, 1, 9.0]), "c": Fixed(["kidney_left"], [0, 4.0])}
    vocabulary = Vocabulary(["kidney_left", "kidney_right"])
    merged = MergedMembers(members, vocabulary, UNetSettings(), taught={"a": {"kidney"}, "c": {"kidney_left"}})
    # left: c alone; right: no site names it, so the union's member is used
    assert merged(torch.zeros(1, 1, 1)).flatten().tolist() == [0.0, 4.0, 9.0]


def test_a_solo_member_has_no_channel_for_what_its_site_never_saw():
    """A liver mask contains its tumours, but says nothing about where they are."""
    facts = {"a": {"liver": 1, "kidney": 1}, "b": {"liver_tumour": 1, "liver": 1}}
    vocabulary = Vocabulary(["liver", "liver_tumour", "kidney_left", "kidney_right"])
    federation = Federation(vocabulary, {name: SiteInfo(name, 1, annotated) for name, annotated in facts.items()})
    network = find_method("solo")(MethodConfig()).build_network(UNetSettings(features=(4, 8)), federation)
    organs = {name: member.vocabulary.organs for name, member in network.members.items()}
    assert organs == {"site-a": ("liver", "kidney_left", "kidney_right"), "site-b": ("liver", "liver_tumour")}


def test_solo_sites_do_not_influence_each_other(tiny, tmp_path):
    """North's member does not depend on the other sites, and each site may write to its own keys only."""
    from safetensors.torch import load_file

    together = tiny(method={"name": "solo"})
    train(together, tmp_path / "together")
    whole = load_file(tmp_path / "together" / "model" / "model.safetensors")
    assert {key.split(".")[1] for key in whole} == {"site-north", "site-south"}
    rule = together.build_method().Server(
        MethodConfig(),
        Federation(Vocabulary(["liver"]), {"north": SiteInfo("north", 1, {"liver": 1})}),
        whole,
    )
    assert set(rule.expects("north")) == set(rule.broadcast("north").tensors)
    assert all(key.startswith("members.site-north.") for key in rule.expects("north"))


def test_central_naive_denies_what_it_does_not_know():
    masks = torch.tensor([[[True, False], [True, True]]])
    batch = Batch(torch.zeros(1, 1, 2), masks, torch.tensor([[True, False]]), ("liver", "spleen"), ("a",))
    naive = batch.assuming_unknown_is_absent()
    assert naive.annotated.all()
    assert naive.masks.tolist() == [[[True, False], [False, False]]]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_each_method_learns(name, tiny, tmp_path):
    """The loss falls, and validation Dice beats that of the first round.

    Not so for naive pooling: it learns its contradictory labels, and may find that "background" is the best answer.
    """
    from panorgan.federation.events import read_events

    experiment = tiny(
        method={"name": name},
        training={"rounds": 10, "local_steps": 4, "validate_every": 2, "optimizer": {"learning_rate": 0.02}},
    )
    train(experiment, tmp_path / "run")
    losses, dice = [], []
    for event in read_events(tmp_path / "run" / "events.jsonl"):
        if event.kind == "round":
            sites = event.facts["sites"].values()
            losses.append(sum(numbers["loss"] for numbers in sites) / len(sites))
            if event.facts["validation"]:
                scores = [v for s in event.facts["validation"].values() for v in s.values()]
                dice.append(sum(scores) / len(scores))
    assert losses[-1] < 0.8 * losses[0]
    assert name == "central_naive" or max(dice) > dice[0]
