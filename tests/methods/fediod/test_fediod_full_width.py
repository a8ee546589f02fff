"""FedIOD's network as wide as in its paper, trained for a few steps: attention must not run away with it."""

from __future__ import annotations

import pytest
import torch

from panorgan.anatomy import Vocabulary
from panorgan.federation.optimizers import make_optimizer, set_rate
from panorgan.federation.settings import OptimizerSettings
from panorgan.losses import partial_dice_ce
from panorgan.methods.fediod import FedIOD, FedIODConfig
from panorgan.methods.fediod.inter_organ import InterOrganNetwork
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.networks import UNetSettings
from panorgan.preparation.batch import Batch

SIDE = 160  # a hundred tokens


def discs(samples: int = 2) -> Batch:
    """A bright disc, the liver, somewhere in noise."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    centres = torch.randint(50, SIDE - 50, (samples, 2), generator=generator)
    masks = torch.stack([(rows - y) ** 2 + (columns - x) ** 2 < 30**2 for y, x in centres])[:, None]
    image = 0.5 * torch.randn(samples, 1, SIDE, SIDE, generator=generator) + masks
    return Batch(image, masks, torch.ones(samples, 1, dtype=torch.bool), ("liver",), ("a",) * samples)


def trained(method: FedIOD, optimizer: OptimizerSettings, steps: int) -> tuple[InterOrganNetwork, Batch]:
    torch.manual_seed(0)
    unet = UNetSettings(dimensions=2, features=(16, 32, 64, 128, 256))
    network = method.build_network(unet, Federation(Vocabulary(["liver"]), {"a": SiteInfo("a", 1, {"liver": 1})}))
    descent, batch = make_optimizer(network, optimizer, method.rate_factors(optimizer.name)), discs()
    for _ in range(steps):
        set_rate(descent, optimizer.learning_rate)
        descent.zero_grad()
        logits, vocabulary = network.channels_for(batch.image, ["liver"])
        partial_dice_ce(logits, batch, vocabulary, network.activation).mean().backward()
        descent.step()
    return network.eval(), batch


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_after_ten_steps_of_adamw_attention_is_as_tame_as_before(gate):
    """No place multiplies a skip connection threefold, and heads have not fallen on single places."""
    method = FedIOD(FedIODConfig(gate=gate))
    network, batch = trained(method, OptimizerSettings(learning_rate=1e-3), steps=10)
    with torch.no_grad(), network.record_attention() as seen:
        network.channels_for(batch.image, ["liver"])
    largest, entropy = seen.numbers.tolist()
    assert largest < 3
    assert entropy > 0.7
