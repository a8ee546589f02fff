"""The phantom federations that methods are compared on, as experiment files.

    python benchmarks/phantom_benchmark.py [FOLDER]      # benchmarks/experiments

Harder than the default phantom, and large enough to tell methods apart: ten organs, small ones among them; scanners
whose patients are all scanned in one contrast phase, so that what a hospital learns about an organ does not simply hold
at the next; eight training scans per site; at least 200 test scans, 40 of them at an external hospital.

| file | sites |
| --- | --- |
| phantom_hard_3 | three, each with three or four organs of its own |
| phantom_hard_7 | seven, each with one or two organs of its own |
| phantom_hard_21 | the seven three times, with other scanners and patients: every organ has three sites |
| phantom_hard_overlap | three whose label sets overlap |
| phantom_hard_twins | three; two label the same organs, the third all others |
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ORGANS = (
    "liver",
    "spleen",
    "kidney_left",
    "kidney_right",
    "pancreas",
    "gallbladder",
    "stomach",
    "duodenum",
    "aorta",
    "oesophagus",
)
KIDNEYS = ("kidney_left", "kidney_right")

FEDERATIONS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "phantom_hard_3": [
        ("liver", "stomach", "gallbladder"),
        ("spleen", *KIDNEYS),
        ("pancreas", "duodenum", "aorta", "oesophagus"),
    ],
    "phantom_hard_7": [
        ("liver",),
        ("spleen", "oesophagus"),
        KIDNEYS,
        ("pancreas",),
        ("gallbladder", "duodenum"),
        ("stomach",),
        ("aorta",),
    ],
    "phantom_hard_overlap": [
        ("liver", "stomach", "gallbladder", "spleen", "aorta"),
        ("spleen", *KIDNEYS, "liver", "pancreas"),
        ("pancreas", "duodenum", "aorta", "oesophagus", "stomach"),
    ],
    "phantom_hard_twins": [
        ("liver", "spleen", *KIDNEYS),
        ("liver", "spleen", *KIDNEYS),
        ("pancreas", "gallbladder", "stomach", "duodenum", "aorta", "oesophagus"),
    ],
}
FEDERATIONS = {**FEDERATIONS, "phantom_hard_21": [*FEDERATIONS["phantom_hard_7"]] * 3}
"""What each site labels."""

SCANNERS: Sequence[Mapping[str, Any]] = (
    {"phases": ["portal"], "noise_hu": 16, "kernel": "soft", "orientation": "RAS"},
    {
        "phases": ["arterial"],
        "noise_hu": 24,
        "kernel": "sharp",
        "spacing_mm": [4.2, 4.2, 4.5],
        "round_view_mm": 352,
        "offset_hu": -4,
    },
    {"phases": ["native"], "noise_hu": 20, "spacing_mm": [4.6, 4.6, 4.0], "orientation": "LAS", "offset_hu": 4},
)
PATIENTS: Sequence[Mapping[str, Any]] = (
    {"size": 1.04, "fatness": 0.55, "age": 64},
    {"size": 0.96, "fatness": 0.3, "age": 48},
    {"size": 0.99, "fatness": 0.4, "age": 68},
    {"size": 1.07, "fatness": 0.65, "age": 56},
    {"size": 0.93, "fatness": 0.2, "age": 35},
)
"""Sites take them in turn; three and five have no common factor, so that few sites are alike."""
EXTERNAL = {
    "name": "island",
    "external": True,
    "cases": 40,
    "phases": ["portal", "arterial", "native"],
    "noise_hu": 21,
    "spacing_mm": [4.4, 4.4, 5.0],
    "orientation": "RAS",
    "round_view_mm": 372,
    "offset_hu": 2,
    "size": 1.01,
    "fatness": 0.42,
    "age": 57,
}
TRAINED, VALIDATED, TESTED = 8, 2, 180
"""Scans per site to train and to validate; scans to test at all sites together."""


def experiment(name: str) -> dict[str, Any]:
    """The experiment file of one federation."""
    labels = FEDERATIONS[name]
    tested = -(-TESTED // len(labels))
    cases = TRAINED + VALIDATED + tested
    sites = [
        {
            "name": f"site{number:02d}",
            "annotated": list(organs),
            "cases": cases,
            **SCANNERS[(number - 1) % len(SCANNERS)],
            **PATIENTS[(number - 1) % len(PATIENTS)],
        }
        for number, organs in enumerate(labels, start=1)
    ]
    return {
        "name": name,
        "seed": 0,
        "vocabulary": list(ORGANS),
        "phantom": {"seed": 20, "organs": list(ORGANS), "sites": [*sites, EXTERNAL]},
        "splits": {"balanced": True, "validation": round(VALIDATED / cases, 4), "test": round(tested / cases, 4)},
        "plan": {"spacing_mm": [5, 5, 5], "intensity": "window", "window_hu": [-160, 240]},
        "network": {"features": [16, 32, 64, 128]},
        "method": {"name": "fedavg"},
        "training": {
            "rounds": 40,
            "local_steps": 20,
            "validate_every": 10,
            "overlap": 0.25,
            "sampling": {"patch_size": [48, 48, 40], "batch_size": 2},
            "optimizer": {"learning_rate": 0.002},
        },
    }


def main() -> None:
    """Write all files."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "experiments")
    for name in FEDERATIONS:
        head = "# Written by python benchmarks/phantom_benchmark.py, which says what it is for.\n"
        text = yaml.safe_dump(experiment(name), sort_keys=False, default_flow_style=None, width=118)
        (folder / f"{name}.yaml").write_text(head + text)


if __name__ == "__main__":
    main()
