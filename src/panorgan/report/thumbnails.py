"""The doctor's thumbnails as vector pictures: the slice, its labels as a tint, and the exact edges of their voxels."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from panorgan.anatomy import catalogue
from panorgan.data_doctor import Thumbnail

UNKNOWN_COLOUR = "#8a99a6"
_TINT = 72  # of 255; the slice stays visible under the label
_DARK = 70  # of 255; a line darker than this needs a light seam to be seen on a scan


@dataclass(frozen=True)
class Edge:
    """The outline of one structure: an SVG path in mm. `dark` lines need a light seam."""

    name: str
    colour: str
    path: str
    dark: bool


@dataclass(frozen=True)
class Picture:
    """A slice laid out in mm. `scan` and `tint` are data URIs stretched over the whole; `tint` is empty without labels.

    `sided`: the patient's right is on the left of the picture (axial and coronal planes).
    """

    width_mm: float
    height_mm: float
    plane: str
    sided: bool
    scan: str
    tint: str
    edges: tuple[Edge, ...]


def draw(thumbnail: Thumbnail) -> Picture:
    """The thumbnail as it is embedded in a page."""
    rows, columns = thumbnail.grey.shape
    row_mm, column_mm = thumbnail.pixel_mm
    colours = {number: colour_of(name) for number, name in enumerate(thumbnail.names, start=1)}
    shown = [int(number) for number in np.unique(thumbnail.labels) if number in colours]
    edges = []
    for number in shown:
        path = edge_path(thumbnail.labels == number, row_mm, column_mm)
        edges.append(Edge(thumbnail.names[number - 1], colours[number], path, _is_dark(colours[number])))
    return Picture(
        width_mm=columns * column_mm,
        height_mm=rows * row_mm,
        plane=thumbnail.plane,
        sided=thumbnail.plane in ("axial", "coronal"),
        scan=_data_uri(png(thumbnail.grey)),
        tint=_data_uri(png(thumbnail.labels, colours)) if shown else "",
        edges=tuple(edges),
    )


def colour_of(name: str) -> str:
    """The catalogue's colour of an organ as ``#rrggbb``; grey for an unknown name."""
    organ = catalogue().get(name)
    return organ.colour if organ else UNKNOWN_COLOUR


def edge_path(mask: NDArray[np.bool_], row_mm: float, column_mm: float) -> str:
    """SVG path along the border between voxels inside and outside a mask [rows, columns], in mm."""
    horizontal = np.diff(np.pad(mask, ((1, 1), (0, 0))).astype(np.int8), axis=0) != 0
    vertical = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1) != 0
    steps = [
        f"M{_short(start * column_mm)},{_short(line * row_mm)}h{_short((end - start) * column_mm)}"
        for line, start, end in _runs(horizontal)
    ]
    steps += [
        f"M{_short(line * column_mm)},{_short(start * row_mm)}v{_short((end - start) * row_mm)}"
        for line, start, end in _runs(vertical.T)
    ]
    return "".join(steps)


def _runs(flags: NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    """(row, first, one after last) of every run of True along the rows."""
    change = np.diff(np.pad(flags, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    lines, starts = np.nonzero(change == 1)
    _, ends = np.nonzero(change == -1)
    return [(int(line), int(start), int(end)) for line, start, end in zip(lines, starts, ends, strict=True)]


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def png(pixels: NDArray[np.uint8], colours: Mapping[int, str] | None = None) -> bytes:
    """A lossless PNG of [rows, columns]: grey, or with `colours` (``#rrggbb`` by value) tinted, the rest clear."""
    image = Image.fromarray(np.ascontiguousarray(pixels, dtype=np.uint8))
    options = {}
    if colours is not None:
        values = range(max(*colours, int(pixels.max())) + 1)
        image.putpalette(b"".join(bytes.fromhex(colours.get(value, "#000000")[1:]) for value in values))
        options["transparency"] = bytes(_TINT if value in colours else 0 for value in values)
    content = io.BytesIO()
    image.save(content, "PNG", optimize=True, **options)
    return content.getvalue()


def _data_uri(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _is_dark(colour: str) -> bool:
    red, green, blue = bytes.fromhex(colour[1:])
    return 0.3 * red + 0.59 * green + 0.11 * blue < _DARK
