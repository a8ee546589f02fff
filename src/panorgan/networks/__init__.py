"""Models with named channels and named parts."""

from panorgan.networks.base import BACKGROUND, SegmentationNetwork, organ_probabilities
from panorgan.networks.unet import UNet, UNetSettings

__all__ = ["BACKGROUND", "SegmentationNetwork", "UNet", "UNetSettings", "organ_probabilities"]
