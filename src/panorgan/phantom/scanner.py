"""The scanner: couch, blur, noise of a reconstruction kernel, beam hardening, round field of view."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter, gaussian_filter1d

from panorgan.phantom.body import Frame
from panorgan.phantom.config import Kernel, PhantomSite
from panorgan.phantom.patient import Canvas
from panorgan.phantom.shapes import Array, coverage

PADDING_HU = -1024.0
BLUR_MM: dict[Kernel, float] = {"soft": 2.0, "standard": 1.5, "sharp": 1.1}


def add_couch(canvas: Canvas, frame: Frame) -> None:
    """The couch under the patient: a curved carbon shell around foam."""
    depth = canvas.scan_y - frame.couch
    sag = np.float32(34) - canvas.scan_x**2 / np.float32(2 * 900.0)
    outer = np.maximum(np.maximum(-depth, depth - sag), np.abs(canvas.scan_x) - 215).astype(np.float32)
    soft = canvas.grid.softness
    outside = 1 - coverage(frame.skin, soft)
    shell = coverage(np.abs(outer + 3.0) - 3.4, soft)
    couch = -1000 + 60 * coverage(outer + 3, soft) + shell * 1080
    canvas.hu += outside * np.clip(couch + 1000, 0, None).astype(np.float32)


def scan(canvas: Canvas, frame: Frame, site: PhantomSite, rng: np.random.Generator) -> NDArray[np.int16]:
    """The image that the site's scanner makes of the finished canvas, int16 HU."""
    if site.table:
        add_couch(canvas, frame)
    spacing = np.asarray(site.spacing_mm)
    body = coverage(frame.skin, canvas.grid.softness)
    thick = gaussian_filter(body, sigma=35.0 / spacing, truncate=2.0)
    image = canvas.hu - 7.0 * (thick - 0.7) * body  # beam hardening leaves a faint cup
    sigma = BLUR_MM[site.kernel] / spacing
    image = gaussian_filter(image, sigma=(sigma[0], sigma[1], 0.8 * sigma[2]))
    if site.kernel == "sharp":
        image += 0.35 * (image - gaussian_filter(image, sigma=(0.8, 0.8, 0)))
    image += noise(image.shape, site.kernel, rng) * (site.noise_hu * (0.45 + 0.75 * thick))
    image += streaks(body, rng) * (0.35 * site.noise_hu)
    image += site.offset_hu + float(rng.normal(0, 1.5))
    if site.round_view_mm is not None:
        outside = np.hypot(canvas.scan_x, canvas.scan_y) > site.round_view_mm / 2
        image = np.where(outside, PADDING_HU, image)
    return np.asarray(np.rint(np.clip(image, PADDING_HU, 3071)), dtype=np.int16)


def noise(shape: tuple[int, ...], kernel: Kernel, rng: np.random.Generator) -> Array:
    """Noise of unit deviation: blotchy for soft kernels, gritty for sharp ones."""
    white = rng.standard_normal(shape, dtype=np.float32)
    if kernel == "sharp":
        grains = white - 0.7 * gaussian_filter(white, sigma=(1.0, 1.0, 0))
    else:
        width = 0.62 if kernel == "soft" else 0.42
        grains = gaussian_filter(white, sigma=(width, width, 0.25))
    return np.asarray(grains / grains.std(), dtype=np.float32)


def streaks(body: Array, rng: np.random.Generator) -> Array:
    """Faint bands from right to left, where the beam crosses the most tissue, about unit deviation."""
    rows = rng.standard_normal(body.shape, dtype=np.float32)
    rows = gaussian_filter1d(rows, sigma=9.0, axis=0, truncate=2.5)
    load = body.mean(axis=0, keepdims=True)
    return np.asarray(rows / (rows.std() + 1e-6) * load**2, dtype=np.float32)
