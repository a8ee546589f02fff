"""A headless Chromium that draws WebGL on the processor, and what its canvases show."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import devtools
import numpy as np
import pytest
from PIL import Image

_WEBGL = ("--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist")
_EDGE = 4


@contextmanager
def chromium_with_webgl(folder: Path) -> Iterator[devtools.Browser]:
    """As `devtools.chromium`, with WebGL 2."""
    with pytest.MonkeyPatch.context() as patch:
        usual = [option for option in devtools._OPTIONS if option != "--disable-gpu"]
        patch.setattr(devtools, "_OPTIONS", (*usual, *_WEBGL))
        with devtools.chromium(folder) as browser:
            yield browser


def shown(page: devtools.Page, folder: Path, pane: int = 0) -> np.ndarray:
    """The pixels [rows, columns, 3] of a canvas as they are on the screen, after the next two frames."""
    page.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))")
    box: dict[str, Any] = page.value(
        f"(r => ({{x: r.x, y: r.y, width: r.width, height: r.height}}))"
        f"(document.querySelectorAll('canvas')[{pane}].getBoundingClientRect())"
    )
    page.picture(folder / "shown.png")
    image = Image.open(io.BytesIO((folder / "shown.png").read_bytes())).convert("RGB")
    # Without the line around a canvas that has the focus.
    left, top = int(box["x"]) + _EDGE, int(box["y"]) + _EDGE
    right, bottom = int(box["x"] + box["width"]) - _EDGE, int(box["y"] + box["height"]) - _EDGE
    return np.asarray(image.crop((left, top, right, bottom))).astype(int)


def coloured(pixels: np.ndarray) -> int:
    """How many pixels have a colour: scans are grey, organs are not."""
    return int((np.ptp(pixels, axis=2) > 24).sum())
