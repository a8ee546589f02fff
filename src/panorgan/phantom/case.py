"""One generated case: image, masks by organ name, and the affine of the stored array."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from panorgan.phantom.body import Frame, close_body, paint_lungs
from panorgan.phantom.config import ORGANS, PhantomConfig, PhantomSite, drawable
from panorgan.phantom.gut import paint_duodenum, paint_gallbladder, paint_gut, paint_oesophagus
from panorgan.phantom.organs import (
    Lesions,
    paint_kidneys,
    paint_liver,
    paint_pancreas,
    paint_spleen,
    paint_vessels,
)
from panorgan.phantom.patient import Canvas, Patient
from panorgan.phantom.scanner import scan
from panorgan.phantom.shapes import Array
from panorgan.phantom.tissue import Tissues

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class PhantomCase:
    """A scan with its masks.

    `hu` and every mask have the same shape, in the site's orientation; `affine` maps voxels to RAS+ mm.
    An organ's mask holds its tumours too.
    """

    id: str
    hu: NDArray[np.int16]
    masks: dict[str, Mask]
    affine: NDArray[np.float64]


def case_id(site: PhantomSite, index: int) -> str:
    """The name of a case, such as ``north_003``."""
    return f"{site.name}_{index:03d}"


def generate_case(config: PhantomConfig, site: PhantomSite, index: int) -> PhantomCase:
    """Draw and scan one patient; the same seed, site and index always give the same case."""
    name_number = int.from_bytes(hashlib.sha256(site.name.encode()).digest()[:8], "little")
    roots = np.random.SeedSequence([config.seed, name_number, index]).spawn(4)
    who, shape, scanner, disease = (np.random.default_rng(root) for root in roots)
    patient = Patient.random(who, site)
    tissues = Tissues(who, site.phases[index % len(site.phases)], patient.visceral)
    axes = _axes(config, site)
    softness = float(np.prod(site.spacing_mm)) ** (1 / 3)
    canvas = Canvas(shape, patient, tissues, axes, softness)
    frame, lesions = _draw(canvas, config.tumours, disease)
    drawn: dict[str, Mask] = {organ: canvas.owner == canvas.number(organ) for organ in ORGANS}
    drawn |= lesions
    wanted = dict.fromkeys((*config.organs, *site.annotated))
    masks = {name: np.logical_or.reduce([drawn[part] for part in drawable()[name]]) for name in wanted}
    hu = scan(canvas, frame, site, scanner)
    return _store(case_id(site, index), hu, masks, axes, site)


def _axes(config: PhantomConfig, site: PhantomSite) -> tuple[Array, Array, Array]:
    """Voxel centres (mm) along left, back and head, centred on the scanner's axis."""
    view = site.field_of_view_mm or config.field_of_view_mm
    axes = []
    for extent, spacing in zip(view, site.spacing_mm, strict=True):
        count = max(8, round(extent / spacing))
        axes.append(((np.arange(count) - (count - 1) / 2) * spacing).astype(np.float32))
    return axes[0], axes[1], axes[2]


def _draw(canvas: Canvas, tumours: bool, disease: np.random.Generator) -> tuple[Frame, dict[str, Mask]]:
    """Paint the whole anatomy, the least important structure first."""
    frame = Frame(canvas)
    lesions = Lesions(canvas, tumours, disease)
    paint_gut(canvas, frame)
    paint_liver(canvas, frame, lesions)
    paint_duodenum(canvas)
    paint_pancreas(canvas, lesions)
    paint_gallbladder(canvas)
    paint_spleen(canvas, frame)
    paint_kidneys(canvas, frame, lesions)
    paint_lungs(canvas, frame)
    paint_oesophagus(canvas)
    paint_vessels(canvas)
    close_body(canvas, frame)
    return frame, lesions.paint()


def _store(
    name: str,
    hu: NDArray[np.int16],
    masks: dict[str, Mask],
    axes: tuple[Array, Array, Array],
    site: PhantomSite,
) -> PhantomCase:
    """Turn left-back-head arrays into the site's orientation."""
    affine = np.diag([-site.spacing_mm[0], -site.spacing_mm[1], site.spacing_mm[2], 1.0])
    affine[:3, 3] = -float(axes[0][0]), -float(axes[1][0]), float(axes[2][0])
    target = nib.orientations.axcodes2ornt(tuple(site.orientation))
    turn = nib.orientations.ornt_transform(nib.orientations.io_orientation(affine), target)
    turned = affine @ nib.orientations.inv_ornt_aff(turn, hu.shape)

    def reorient(array: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(nib.orientations.apply_orientation(array, turn))

    return PhantomCase(name, reorient(hu), {organ: reorient(mask) for organ, mask in masks.items()}, turned)
