"""Checkups written by hand, for tests of what shows them: no file is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from panorgan.data_doctor import CaseFacts, Checkup, Finding, Severity, Source, StructureFacts, Thumbnail

ROWS, COLUMNS = 40, 60
PIXEL_MM = (6.0, 5.0)


def thumbnail(seed: int, names: tuple[str, ...] = ("liver", "spleen")) -> Thumbnail:
    """An elliptic body with a liver on the patient's right (left in the picture) and a spleen."""
    rows, columns = np.mgrid[:ROWS, :COLUMNS]
    body = ((rows - 20) / 18) ** 2 + ((columns - 30) / 28) ** 2 < 1
    noise = np.random.default_rng(seed).normal(0, 8, (ROWS, COLUMNS))
    labels = np.zeros((ROWS, COLUMNS), dtype=np.uint8)
    labels[((rows - 18) / 9) ** 2 + ((columns - 16) / 11) ** 2 < 1] = 1
    if len(names) > 1:
        labels[((rows - 24) / 5) ** 2 + ((columns - 48) / 5) ** 2 < 1] = 2
    grey = np.clip(np.where(body, 120, 10) + 50 * (labels > 0) + noise, 0, 255).astype(np.uint8)
    return Thumbnail(grey, labels, names, "axial", PIXEL_MM)


def structure(name: str, voxels: int = 1200) -> StructureFacts:
    centre = (40.0, 0.0, 10.0) if voxels else (float("nan"),) * 3
    return StructureFacts(name, voxels, voxels * 0.0125, centre, min(voxels, 1), 1.0, 60.0 if voxels else float("nan"))


def case(site: str, number: int, **changes) -> CaseFacts:
    facts = {
        "patient": f"p{number}",
        "image": Path(f"/data/{site}/imagesTr/{site}_{number:03d}_0000.nii.gz"),
        "shape": (512, 512, 80 + number),
        "spacing_mm": (0.75, 0.75, 5.0 if site == "south" else 2.5),
        "orientation": "LPS",
        "modality": "CT",
        "intensity": {"minimum": -1024.0, "median": -300.0, "maximum": 1800.0},
        "content": f"{site}{number}",
        "structures": (structure("liver"), structure("spleen")),
        "thumbnail": thumbnail(number),
    }
    return CaseFacts(site=site, case=f"{site}_{number:03d}", **{**facts, **changes})


def healthy(cases: int = 5) -> Checkup:
    source = Source("north", Path("/data/north"))
    return Checkup((source,), {"north": "nnunet"}, tuple(case("north", n) for n in range(cases)), ())


def sick() -> Checkup:
    """Two sites: 15 labels on another grid, two different stray ids, outliers, a duplicate and a note on a folder."""
    north = [case("north", n) for n in range(20)]
    north[3] = case("north", 3, shape=(), spacing_mm=None, modality="", structures=(), thumbnail=None)
    north[4] = case("north", 4, structures=(structure("liver"), structure("spleen", 0)))
    south = [case("south", n, structures=(structure("kidney"),), thumbnail=None) for n in range(3)]
    shapes = [
        finding(
            "shape-mismatch", Severity.error, f"north_{n:03d}", "The label has another number of voxels than its image."
        )
        for n in range(5, 20)
    ]
    stray = [
        finding("stray-label", Severity.error, f"north_{n:03d}", f"The label holds the undeclared id {n + 7}.")
        for n in (0, 1)
    ]
    spacing = [
        Finding(
            "spacing-outlier",
            Severity.warning,
            "south",
            f"south_{n:03d}",
            "The slices are much thicker than elsewhere.",
            f"{5 + n} mm here, 2.5 mm is usual",
            "Look at the scan; leave it out if it is a localiser.",
        )
        for n in range(3)
    ]
    small = Finding(
        "few-patients",
        Severity.note,
        "south",
        "",
        "The site has only three cases.",
        "a test split of one case says little",
        "Add cases, or mark the site 'external: true'.",
    )
    sources = (Source("north", Path("/data/north")), Source("south", Path("/data/south")))
    layouts = {"north": "nnunet", "south": "totalsegmentator"}
    return Checkup(sources, layouts, (*north, *south), (*shapes, *stray, *spacing, small))


def finding(code: str, severity: Severity, case_id: str, what: str) -> Finding:
    return Finding(
        code,
        severity,
        "north",
        case_id,
        what,
        "the label has 512 × 512 × 80 voxels, the image 512 × 512 × 81",
        "Write corrected copies: panorgan doctor /data/north --fix-headers /data/north_fixed",
    )
