"""Hounsfield units of tissues, per contrast phase and patient."""

from __future__ import annotations

from typing import Literal

import numpy as np

Phase = Literal["native", "arterial", "portal"]

PHASES: tuple[Phase, ...] = ("native", "arterial", "portal")

AIR, FAT, LUNG = -1000.0, -98.0, -840.0

# Means in the three phases; kidneys enhance from the cortex inwards, the liver last.
ENHANCEMENT: dict[str, tuple[float, float, float]] = {
    "muscle": (50, 55, 60),
    "liver": (58, 72, 106),
    "spleen": (48, 108, 114),
    "renal_cortex": (34, 165, 160),
    "renal_medulla": (32, 78, 145),
    "pancreas": (42, 92, 88),
    "aorta": (41, 290, 150),
    "inferior_vena_cava": (40, 75, 132),
    "portal_vein": (41, 95, 158),
    "hepatic_vein": (40, 58, 148),
    "heart": (42, 200, 140),
    "gut_wall": (40, 72, 82),
    "gallbladder": (9, 9, 10),
    "gland": (30, 70, 75),
    "liver_tumour": (32, 44, 54),
    "liver_tumour_rim": (48, 82, 88),
    "kidney_tumour": (36, 98, 88),
    "kidney_tumour_rim": (38, 118, 104),
    "pancreas_tumour": (28, 42, 44),
    "pancreas_tumour_rim": (36, 60, 60),
}


class Tissues:
    """The HU of each tissue in one patient: the phase's mean, a personal uptake, and a small spread."""

    def __init__(self, rng: np.random.Generator, phase: Phase, fatness: float) -> None:
        column = PHASES.index(phase)
        uptake = float(np.clip(rng.normal(1.0, 0.1), 0.8, 1.25))
        # Fatty livers are darker than the spleen; heavy patients have them more often.
        steatosis = float(np.clip(rng.normal(14 * (fatness - 0.35), 5), -3, 22))
        self._hu: dict[str, float] = {}
        for name, means in ENHANCEMENT.items():
            gain = uptake * (means[column] - means[0])
            self._hu[name] = means[0] + gain + float(rng.normal(0, 3))
        self._hu["liver"] -= steatosis
        self.phase: Phase = phase

    def __getitem__(self, name: str) -> float:
        return self._hu[name]
