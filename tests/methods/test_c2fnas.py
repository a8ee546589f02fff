"""C2FNAS: twelve cells, what each reads, the operations' parameters by hand, every shape of network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.methods.c2fnas import DECODER, ENCODER, Cell, Layers, Resolution, SearchedNetwork
from panorgan.networks import UNetSettings

ORGANS = Vocabulary(["liver", "spleen"])


def network(dimensions: int = 3, features: tuple[int, ...] = (2, 4, 4, 6, 8), **more: object) -> SearchedNetwork:
    torch.manual_seed(0)
    return SearchedNetwork(ORGANS, UNetSettings(dimensions=dimensions, features=features, **more))


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_there_are_twelve_cells_on_four_resolutions():
    assert (len(ENCODER), sum(map(len, ENCODER)), sum(map(len, DECODER))) == (4, 6, 6)
    cells = [module for module in network().modules() if isinstance(module, Cell)]
    assert len(cells) == 12


def test_it_is_about_as_large_as_published():
    """FedIOD's Table VII counts 7.88 M in 2D."""
    with torch.device("meta"):
        assert size(network(2, (32, 64, 128, 256, 512))) / 1e6 == pytest.approx(7.88, abs=0.25)


@pytest.mark.parametrize(
    ("kind", "dimensions", "taps"),
    [("2D", 3, 9), ("3D", 3, 27), ("P3D", 3, 9 + 3), ("2D", 2, 9), ("3D", 2, 9), ("P3D", 2, 9)],
)
def test_a_cell_has_an_operation_between_two_1x1_convolutions(kind, dimensions, taps):
    """5·5·taps, 5·5 twice, scale and shift; a second input 5·5; a coarser one of 7 channels 7·5, scale and shift."""
    layers = Layers(UNetSettings(dimensions=dimensions))
    plain = 25 * taps + 2 * 25 + 2 * 5
    assert size(Cell(layers, kind, 5)) == plain
    assert size(Cell(layers, kind, 5, 5)) == plain + 25
    assert size(Cell(layers, kind, 5, 7, coarse=True)) == plain + 35 + 2 * 5


def test_only_a_3d_operation_sees_other_slices_at_once():
    def reach(kind: str) -> list[int]:
        torch.manual_seed(0)
        cell = Cell(Layers(UNetSettings()), kind, 1)
        cell.operation = nn.Sequential(*list(cell.operation)[1:-1])  # linear
        image = torch.zeros(1, 1, 5, 5, 5)
        image[0, 0, 2, 2, 2] = 1
        return [len(where.unique()) for where in cell(image)[0, 0].nonzero(as_tuple=True)]

    assert [reach(kind) for kind in ("2D", "3D", "P3D")] == [[3, 3, 1], [3, 3, 3], [3, 3, 3]]


def test_earlier_is_what_the_cell_before_has_read():
    """Cells that add 1 and what else they read: 9 + 1 + 100, 110 + 1, and 111 + 1 + 110."""

    class Adds(nn.Module):
        def forward(self, x, other=None):
            return x + 1 + (0 if other is None else other)

    level = Resolution(Layers(UNetSettings(dimensions=2)), DECODER[0], 1, 1)
    level.cells = nn.ModuleList(Adds() for _ in level.cells)
    assert [float(made) for made in level(torch.tensor(9.0), torch.tensor(100.0))] == [110, 111, 222]


def test_the_way_up_reads_the_last_cell_of_each_resolution_and_the_output_the_last_two():
    net, up, seen = network(2), [], {}
    down = []
    for level in net.encoder:
        level.register_forward_hook(lambda module, inputs, out: down.append(out))
    for level in reversed(net.decoder):
        level.register_forward_hook(lambda module, inputs, out: up.append((inputs, out)))
    net.together.register_forward_hook(lambda module, inputs, out: seen.update(read=inputs[0]))
    net(torch.randn(1, 1, 32, 32))
    coarse = down[-1][-1]
    for skip, ((x, other), out) in zip(reversed(down[:-1]), up, strict=True):
        assert x is skip[-1]
        assert other is coarse
        coarse = out[-1]
    assert torch.equal(seen["read"], torch.cat(up[-1][1][-2:], dim=1))
    assert not torch.equal(*up[-1][1][-2:])


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("levels", [2, 3, 5, 6])
def test_any_number_of_levels(dimensions, levels):
    net = network(dimensions, (4,) * levels)
    edge = 2 ** (levels - 1)
    assert net(torch.randn(1, 1, 2 * edge, *(edge,) * (dimensions - 1), requires_grad=True)).shape[:2] == (1, 3)


def test_thick_slices_are_halved_where_the_network_says():
    net = network(features=(2, 4, 4), strides=((1, 1, 1), (2, 2, 1), (2, 2, 2)))
    assert net(torch.randn(1, 1, 8, 8, 2)).shape == (1, 3, 8, 8, 2)


def test_every_weight_gets_a_gradient():
    net = network()
    net(torch.randn(2, 1, 32, 32, 16)).square().mean().backward()
    assert [name for name, parameter in net.named_parameters() if parameter.grad is None] == []
