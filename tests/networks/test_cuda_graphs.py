"""Training passes as CUDA graphs: when they may stand in for the pass itself. `OnPaper` stands in for a GPU."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.fediod.inter_organ import AttentionLoss, InterOrganNetwork, InterOrganSettings
from panorgan.networks import UNet, UNetSettings, cuda_graphs
from panorgan.networks.cuda_graphs import GraphCache, graph_cache_for, retry_without_graphs, unshared_gradients

ORGANS = ("liver", "spleen", "pancreas")


class OnPaper:
    """In the place of `GraphedPass`: graphs that compute as they are replayed, and count it.

    As on a GPU, results and gradients lie where they always lie, and every pass of any of them overwrites them: what
    was handed out before is then no number any more.
    """

    made = 0
    memory: ClassVar[list[torch.Tensor]] = []

    def __init__(self, network, compute, inputs, memory):
        type(self).made += 1
        self.network, self.inputs = network, [given.detach().clone() for given in inputs]
        self.last_used, self.of_inputs = 0, [None] * len(inputs)
        with torch.no_grad():
            results = compute(*self.inputs)
        self.outputs = [torch.empty_like(result) for result in results]
        self.given = [torch.empty_like(result) for result in results]
        self.differentiable = [True] * len(results)
        self.of_parameters = [torch.empty_like(parameter) for parameter in network.parameters()]
        self.memory += [*self.outputs, *self.of_parameters]

        def forward():
            for tensor in self.memory:
                tensor.fill_(torch.nan)
            with torch.enable_grad():
                self.computed = list(compute(*self.inputs))
            self._fill(self.outputs, self.computed)

        def backward():
            for tensor in self.memory:
                tensor.fill_(torch.nan)
            self._fill(self.of_parameters, torch.autograd.grad(self.computed, list(network.parameters()), self.given))

        self.forward, self.backward = _Graph(forward), _Graph(backward)

    @staticmethod
    def _fill(places, values):
        for place, value in zip(places, values, strict=True):
            place.copy_(value.detach())


class _Graph:
    def __init__(self, replay):
        self.replay = replay


@pytest.fixture
def on_paper(monkeypatch):
    """Everything but the GPU: which passes are recorded and replayed."""
    monkeypatch.setattr(cuda_graphs, "GraphedPass", OnPaper)
    monkeypatch.setattr(cuda_graphs, "_MEMORY", {})
    OnPaper.made = 0
    OnPaper.memory.clear()
    return OnPaper


def network_and_graphs():
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return network, GraphCache(network)


def one_step(network, graphs, image, key="logits"):
    network.zero_grad(set_to_none=True)
    (out,) = graphs(key, lambda given: (network(given),), image)
    out.square().sum().backward()
    return out.detach(), [parameter.grad.clone() for parameter in network.parameters()]


def test_the_second_pass_of_a_kind_is_recorded_and_gives_the_same(on_paper):
    network, graphs = network_and_graphs()
    image = torch.randn(5, 3)
    plain = one_step(network, graphs, image)
    assert on_paper.made == 0
    for _ in range(3):
        out, gradients = one_step(network, graphs, image)
        assert torch.equal(out, plain[0])
        assert all(torch.equal(found, expected) for found, expected in zip(gradients, plain[1], strict=True))
    assert on_paper.made == 1


def test_weights_that_change_in_place_are_read_anew(on_paper):
    network, graphs = network_and_graphs()
    image = torch.randn(5, 3)
    for _ in range(2):
        one_step(network, graphs, image)
    with torch.no_grad():
        network[0].weight.mul_(2)
    out, _ = one_step(network, graphs, image)
    assert torch.equal(out, network(image).detach())
    assert on_paper.made == 1


@pytest.mark.parametrize("change", ["size", "strides", "key", "place", "frozen", "mode", "type"])
def test_whatever_a_graph_takes_for_granted_makes_another_graph(on_paper, change):
    network, graphs = network_and_graphs()
    image, key = torch.randn(5, 3), "logits"
    for _ in range(3):
        one_step(network, graphs, image)
    around = nullcontext()
    if change == "size":
        image = torch.randn(6, 3)
    elif change == "strides":
        image = torch.randn(3, 5).T
    elif change == "key":
        key = "others"
    elif change == "place":
        network[0].weight.data = network[0].weight.data.clone()
    elif change == "frozen":
        network[1].requires_grad_(False)
        network[0].bias.requires_grad_(False)
    elif change == "mode":
        network[1].eval()
    else:
        around = torch.autocast("cpu", torch.bfloat16)
    made = on_paper.made
    network.zero_grad(set_to_none=True)
    with around:
        (out,) = graphs(key, lambda given: (network(given),), image)
    assert on_paper.made == made  # seen for the first time: not recorded, and not replayed from the older recording
    del out
    with around:
        graphs(key, lambda given: (network(given),), image)
    assert on_paper.made == made + 1


def test_every_image_is_looked_at(on_paper):
    network, graphs = network_and_graphs()
    for _ in range(4):
        image = torch.randn(5, 3)
        out, _ = one_step(network, graphs, image)
        assert torch.equal(out, network(image).detach())
    assert on_paper.made == 1


def test_gradients_that_are_there_are_added_to(on_paper):
    """A graph overwrites its gradients; where some are kept, the pass is computed as ever."""
    network, graphs = network_and_graphs()
    first, second = torch.randn(5, 3), torch.randn(5, 3)
    for _ in range(2):
        once = one_step(network, graphs, first)[1]
    (out,) = graphs("logits", lambda given: (network(given),), second)  # without zero_grad
    out.square().sum().backward()
    both = [parameter.grad.clone() for parameter in network.parameters()]
    network.zero_grad(set_to_none=True)
    network(second).square().sum().backward()
    for parameter, gradient, together in zip(network.parameters(), once, both, strict=True):
        torch.testing.assert_close(together, gradient + parameter.grad)


def test_a_pass_within_a_pass_is_computed_as_ever(on_paper):
    """Two graphs at once would share memory: the second waits until the first has come back, or is forgotten."""
    network, graphs = network_and_graphs()
    first, second = torch.randn(5, 3), torch.randn(5, 3)
    for _ in range(2):
        one_step(network, graphs, first)
    network.zero_grad(set_to_none=True)
    (a,) = graphs("logits", lambda given: (network(given),), first)
    (b,) = graphs("logits", lambda given: (network(given),), second)
    assert "_ReplayGraph" in type(a.grad_fn).__name__
    assert "_ReplayGraph" not in type(b.grad_fn).__name__
    (a * b).sum().backward()
    found = [parameter.grad.clone() for parameter in network.parameters()]
    network.zero_grad(set_to_none=True)
    (network(first) * network(second)).sum().backward()
    for parameter, gradient in zip(network.parameters(), found, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    network.zero_grad(set_to_none=True)
    (forgotten,) = graphs("logits", lambda given: (network(given),), first)
    del forgotten
    (c,) = graphs("logits", lambda given: (network(given),), first)
    assert "_ReplayGraph" in type(c.grad_fn).__name__


def test_what_was_handed_out_stays_as_it_is(on_paper):
    network, graphs = network_and_graphs()
    first, second = torch.randn(5, 3), torch.randn(5, 3)
    for _ in range(2):
        one_step(network, graphs, first)
    network.zero_grad(set_to_none=True)
    (kept,) = graphs("logits", lambda given: (network(given),), first)
    kept = kept.detach()  # the very memory
    one_step(network, graphs, second)
    assert torch.equal(kept, network(first).detach())


def test_a_replayed_pass_goes_back_once(on_paper):
    network, graphs = network_and_graphs()
    image = torch.randn(5, 3)
    for _ in range(2):
        one_step(network, graphs, image)
    network.zero_grad(set_to_none=True)
    (out,) = graphs("logits", lambda given: (network(given),), image)
    loss = out.square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


def test_only_a_few_graphs_are_kept(on_paper):
    """Passes of more kinds than there is room for are computed; they do not push each other out again and again."""
    network, graphs = network_and_graphs()
    for _ in range(5):
        for size in range(1, 2 * cuda_graphs._MAX_GRAPHS):
            one_step(network, graphs, torch.randn(size, 3))
    assert on_paper.made == len(graphs._recorded) == cuda_graphs._MAX_GRAPHS


def test_a_graph_that_nobody_asks_for_makes_way(on_paper):
    network, graphs = network_and_graphs()
    for size in range(1, cuda_graphs._MAX_GRAPHS + 1):
        for _ in range(2):
            one_step(network, graphs, torch.randn(size, 3))
    last, new = torch.randn(cuda_graphs._MAX_GRAPHS, 3), torch.randn(50, 3)
    for _ in range(cuda_graphs._IDLE_PASSES):
        one_step(network, graphs, last)
    for _ in range(2):
        one_step(network, graphs, new)
    assert on_paper.made == cuda_graphs._MAX_GRAPHS + 1
    assert len(graphs._recorded) == cuda_graphs._MAX_GRAPHS


def test_gradients_of_another_part_of_the_loss_are_added(on_paper):
    """As in FedProx, whose loss reads the weights themselves."""
    network, graphs = network_and_graphs()
    image = torch.randn(5, 3)
    results = []
    for _ in range(3):
        network.zero_grad(set_to_none=True)
        (out,) = graphs("logits", lambda given: (network(given),), image)
        (out.square().sum() + sum(parameter.square().sum() for parameter in network.parameters())).backward()
        results.append([parameter.grad.clone() for parameter in network.parameters()])
    assert on_paper.made == 1
    for gradients in results[1:]:
        assert all(torch.equal(found, expected) for found, expected in zip(gradients, results[0], strict=True))


def test_where_recording_fails_training_goes_on(monkeypatch):
    """It says why, in one line; and does not try again."""
    tried = []

    def fails(*arguments):
        tried.append(arguments)
        raise RuntimeError("CUDA out of memory. Tried to allocate much.\nMore words.")

    monkeypatch.setattr(cuda_graphs, "GraphedPass", fails)
    network, graphs = network_and_graphs()
    image = torch.randn(5, 3)
    one_step(network, graphs, image)
    with pytest.warns(RuntimeWarning, match="without CUDA graphs") as reported:
        out, _ = one_step(network, graphs, image)
    assert "More words" not in str(reported[0].message)
    assert torch.equal(out, network(image).detach())
    one_step(network, graphs, image)
    assert len(tried) == 1


def test_where_memory_runs_out_all_graphs_of_the_device_are_given_up(on_paper):
    """Also those of other networks: simulated sites share one device."""
    network, graphs = network_and_graphs()
    other, others = network_and_graphs()
    image = torch.randn(5, 3)
    for _ in range(2):
        one_step(network, graphs, image)
        one_step(other, others, image)
    assert graphs._recorded
    asked = []

    def predict():
        asked.append(bool(graphs._recorded))
        if len(asked) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return "done"

    with pytest.warns(RuntimeWarning, match="memory of this GPU"):
        assert retry_without_graphs(torch.device("cpu"), predict) == "done"
    assert asked == [True, False]
    assert not others._recorded
    one_step(other, others, image)
    assert on_paper.made == 2  # nor are there new ones


def test_memory_that_does_not_suffice_in_any_case_is_an_error():
    def too_large():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        retry_without_graphs(torch.device("cpu"), too_large)


def test_another_thread_computes_while_one_makes_up_its_mind(on_paper):
    network, graphs = network_and_graphs()
    image = torch.randn(5, 3)
    for _ in range(2):
        one_step(network, graphs, image)
    network.zero_grad(set_to_none=True)
    with cuda_graphs._memory_of(image.device).entry:
        (out,) = graphs("logits", lambda given: (network(given),), image)
    assert "_ReplayGraph" not in type(out.grad_fn).__name__


def test_a_frozen_network_is_computed(on_paper):
    network, graphs = network_and_graphs()
    network.requires_grad_(False)
    for _ in range(3):
        graphs("logits", lambda given: (network(given),), torch.randn(5, 3))
    assert on_paper.made == 0


def test_maps_that_are_put_in_are_no_part_of_a_graph():
    settings = UNetSettings(dimensions=2, features=(4, 8, 16))
    small = InterOrganSettings(layers=1, heads=2, head_width=4, mlp_width=8, dropout=0)
    network = InterOrganNetwork(Vocabulary(ORGANS), settings, None, small)
    network.run_pass = _Forbidden()
    maps = [torch.full((1, 2, 16, 16), 1 / 16)]
    with network.override_attention(maps):
        network(torch.randn(1, 1, 16, 16))
        with network.record_attention() as seen:
            network(torch.randn(1, 1, 16, 16))
    torch.testing.assert_close(seen.mean, torch.full((1, 16, 16), 1 / 16))


def test_copies_of_a_network_have_no_graphs():
    network = UNet(Vocabulary(ORGANS), UNetSettings(dimensions=2, features=(4, 8)))
    network.graphs = GraphCache(network)
    assert copy.deepcopy(network).graphs is None
    assert pickle.loads(pickle.dumps(network)).graphs is None


@pytest.mark.parametrize("words", ["off", "OFF", "0"])
def test_graphs_can_be_switched_off(monkeypatch, words):
    network = nn.Linear(1, 1)
    assert isinstance(graph_cache_for(network, torch.device("cuda")), GraphCache)
    assert graph_cache_for(network, torch.device("cpu")) is None
    assert graph_cache_for(nn.BatchNorm2d(1), torch.device("cuda")) is None  # it keeps statistics
    monkeypatch.setenv("PANORGAN_CUDA_GRAPHS", words)
    assert graph_cache_for(network, torch.device("cuda")) is None


def test_only_training_passes_on_a_gpu_are_replayed(monkeypatch):
    network = UNet(Vocabulary(ORGANS), UNetSettings(dimensions=2, features=(4, 8)))
    network.graphs = _Forbidden()
    image = torch.randn(1, 1, 16, 16)
    network(image)  # on a CPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))  # pretended
    with pytest.raises(AssertionError, match="nothing is to be replayed"):
        network.run_pass("image", lambda given: (given,), image)
    with torch.no_grad():
        assert network.run_pass("image", lambda given: (given,), image) == (image,)
    assert network.eval().run_pass("image", lambda given: (given,), image) == (image,)


class _Forbidden:
    def __call__(self, *arguments):
        raise AssertionError("nothing is to be replayed here")


def test_who_watches_a_replayed_pass_gets_its_mean_attention():
    """And its numbers. What else the record holds is of the pass that was recorded: it is dropped."""
    settings = UNetSettings(dimensions=2, features=(4, 8, 16))
    small = InterOrganSettings(layers=1, heads=2, head_width=4, mlp_width=8)
    network = InterOrganNetwork(Vocabulary(ORGANS), settings, None, small)
    image = torch.randn(1, 1, 16, 16)
    with network.record_attention() as seen:
        network(image)
        assert len(seen.maps) == 1
        replayed = []
        network.run_pass = lambda key, compute, *inputs: (
            replayed.extend(t.clone() for t in compute(*inputs)) or replayed
        )
        network(image)
    assert seen.maps == ()
    assert seen.weights is None
    assert seen.numbers is replayed[2]
    assert seen.numbers.shape == (2,)
    assert seen.grid == (4, 4)
    assert seen.mean.shape == (1, 16, 16)


def test_a_judge_is_asked_within_the_pass():
    settings = UNetSettings(dimensions=2, features=(4, 8, 16))
    small = InterOrganSettings(layers=1, heads=2, head_width=4, mlp_width=8, dropout=0)
    network = InterOrganNetwork(Vocabulary(ORGANS), settings, None, small)
    image, given = torch.randn(1, 1, 16, 16), torch.tensor(3.0)
    with network.record_attention(
        AttentionLoss("sum", lambda mean, factor: mean.square().sum() * factor, (given,))
    ) as seen:
        network(image)
        torch.testing.assert_close(seen.loss, seen.mean.square().sum() * 3)
        plain = seen.loss
        network.run_pass = lambda key, compute, *inputs: tuple(t.clone() for t in compute(*inputs))  # as replayed
        network(image)
    torch.testing.assert_close(seen.loss, plain)
    assert seen.mean.numel() == 0  # of another pass


def test_gradients_lie_as_their_weights_do():
    weight, crossed = torch.randn(4, 6), torch.randn(6, 4).T
    same, copied, nothing = unshared_gradients([crossed, weight, weight], [crossed, crossed, None])
    assert same is crossed
    assert torch.equal(copied, crossed)
    assert copied.stride() == weight.stride()
    assert nothing is None


def test_every_weight_has_a_gradient_of_its_own():
    """a + b has the same gradient for both; so has a sum, as one number that is repeated."""
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    found = torch.autograd.grad((a + b).square().sum() + a.sum() + b.sum(), [a, b])
    own = unshared_gradients([a, b], [found[0], found[0]])
    for gradient in own:
        gradient.mul_(2)
    for gradient, expected in zip(
        own, torch.autograd.grad((a + b).square().sum() + (a + b).sum(), [a, b]), strict=True
    ):
        assert torch.equal(gradient, 2 * expected)
