"""Models with named channels and named parts."""

from panorgan.networks.base import BACKGROUND, SegmentationNetwork, organ_probabilities, select_channels
from panorgan.networks.organ_parts import OrganNetwork, organ_network
from panorgan.networks.settings import UNetSettings
from panorgan.networks.unet import UNet

__all__ = [
    "BACKGROUND",
    "OrganNetwork",
    "SegmentationNetwork",
    "UNet",
    "UNetSettings",
    "organ_network",
    "organ_probabilities",
    "select_channels",
]
