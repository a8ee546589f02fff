"""Model folders of every kind of network, with random weights: exporting and predicting need no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch

from panorgan.anatomy import Vocabulary
from panorgan.data.labels import CONVENTIONS
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.networks import UNetSettings
from panorgan.preparation.plan import Plan
from panorgan.workflows.model_bundle import save_model

ORGANS = ("liver", "liver_tumour", "spleen", "kidney_left")
SITES = {"north": {"liver": 3, "liver_tumour": 2}, "south": {"spleen": 2, "kidney_left": 2, "liver": 1}}
SMALL_TRANSFORMER = {"layers": 2, "heads": 2, "head_width": 8, "mlp_width": 16}


def make_model(
    folder: Path,
    method: dict[str, Any] | None = None,
    network: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    patch: tuple[int, int, int] = (8, 8, 8),
    overlap: float = 0.5,
    postprocess: str = "none",
    organs: tuple[str, ...] = ORGANS,
    channels: tuple[str, ...] = (),
) -> Path:
    """Write a model folder; returns it."""
    chosen = method or {"name": "fedavg"}
    settings = UNetSettings(**{"features": (4, 8), "organ_prior": None, **(network or {})})
    facts = {name: SiteInfo(name, 3, annotated) for name, annotated in SITES.items()}
    kind = find_method(chosen["name"])
    built = kind(kind.Config(**{key: value for key, value in chosen.items() if key != "name"}))
    torch.manual_seed(0)
    made = built.build_network(settings, Federation(Vocabulary(organs), facts))
    card = {
        "name": "made",
        "organs": list(organs),
        "channels": list(made.channels),
        "convention": CONVENTIONS[made.activation],
        "method": chosen,
        "network": settings.as_json(),
        "plan": Plan(**{"spacing_mm": (3, 3, 3), "window_hu": (-160, 240), **(plan or {})}).as_json(),
        "inference": {"patch_size": list(patch), "overlap": overlap},
        "postprocess": postprocess,
        "sites": {name: info.as_json() for name, info in facts.items()},
        "round": 1,
        "validation_dice": None,
        "parameters": sum(p.numel() for p in made.parameters()),
        "run": "made",
        **({"input_channels": list(channels)} if channels else {}),
    }
    save_model(folder, dict(made.state_dict()), card)
    return folder


def write_scans(folder: Path) -> list[Path]:
    """Three small scans: stored with a slope, turned and oblique, and with thick slices surrounded by air."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(3)
    blocks = random.normal(0, 150, size=(6, 5, 4)).repeat(4, 0).repeat(4, 1).repeat(4, 2)

    def save(name: str, voxels: np.ndarray, affine: np.ndarray, slope: float = 1, inter: float = 0) -> Path:
        image = nib.Nifti1Image(voxels, affine)
        image.header.set_slope_inter(slope, inter)
        path = folder / name
        nib.save(image, path)
        return path

    stored = np.round(blocks).astype(np.int16)
    turned = np.diag([-2.9, -3.1, 3.3, 1.0])[[1, 0, 2, 3]]
    turned[:3, 3] = (10, -20, 30)
    angle = np.deg2rad(12)
    tilt = np.eye(4)
    tilt[1:3, 1:3] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    air = np.pad(blocks, ((9, 7), (6, 8), (3, 2)), constant_values=-1000.0).astype(np.float32)
    return [
        save("slope.nii.gz", stored, np.diag([3.0, 3.0, 3.0, 1.0]), 0.37, -12.6),
        save("turned.nii.gz", blocks.astype(np.float32), tilt @ turned),
        save("thick.nii.gz", air, np.diag([2.0, 2.0, 7.0, 1.0])),
    ]
