"""Small pieces that methods share, where no other test covers them: names of ablation rows, tools without networks."""

from __future__ import annotations

import pytest
import torch
from refusing import refused

from panorgan.anatomy import Vocabulary
from panorgan.errors import ConfigError, RunError
from panorgan.methods.base import SiteTools
from panorgan.methods.shared.ablation import AblationRow
from panorgan.methods.ufps import UFPSConfig
from panorgan.networks import UNet, UNetSettings


@pytest.mark.parametrize("label", ["", " ", "+T ", "a, b"])
def test_a_row_that_cannot_be_named_on_the_command_line_is_refused(label):
    with refused("ablation-row-name", ConfigError):
        AblationRow(label, ())


def test_tools_build_no_other_networks_unless_they_are_told_how():
    model = UNet(Vocabulary(["liver"]), UNetSettings(features=(4, 8)))
    with refused("no-network-builder", RunError) as caught:
        SiteTools(model, torch.optim.SGD(model.parameters(), 0.1)).network_of("north")
    assert "north" in caught.value.what


def test_a_schedule_without_rounds_is_refused():
    with refused("empty-schedule", ConfigError):
        UFPSConfig(schedule_start=0.5, schedule_end=0.5)
    UFPSConfig(schedule_start=0.5, schedule_end=0.5, weight_schedule="none")
