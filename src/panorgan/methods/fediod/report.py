"""FedIOD's section of a run's page: where the network looks to find organs, and the weight of each site in each head.

Only the report imports this file, when it writes a page; so it may import from rooms above this one.
Maps are 1 on average. Colours go by doublings from 1 on; what gets less than the average stays clear.
"""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.image import imsave
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from panorgan.checksums import is_damaged
from panorgan.data.case import Case
from panorgan.federation.events import read_events
from panorgan.methods.fediod.attention_on_scans import Looks, ScanPatch, look, on_plane, patches_of
from panorgan.methods.fediod.bottleneck_attention import head_of_key
from panorgan.methods.fediod.head_attribution import head_weights
from panorgan.methods.fediod.inter_organ import InterOrganNetwork
from panorgan.methods.fediod.method import ATTRIBUTION
from panorgan.preparation.plan import Plan
from panorgan.report.overlays import (
    MR_PERCENTILES,
    WINDOW_HU,
    CaseKey,
    encode_slice,
    outline,
    radiological,
    ruler_length,
)
from panorgan.report.sections import MethodSection, try_to_draw
from panorgan.report.tables import NOTHING, number, title
from panorgan.workflows.model_bundle import load_model
from panorgan.workflows.reference_models import local_models
from panorgan.workflows.run import Run

_MOST_CASES = 8
_CASES_PER_SITE = 2
_LONGEST_SIDE = 256  # pixels of a scan; pictures stand side by side
# Blue, red and yellow without their darkest shades: monotone in lightness, distinguishable with any colour vision.
_COLOURS = colormaps["plasma"]
_DARKEST, _OPAQUE = 0.2, 0.8
_STEPS = 48  # shades; few enough for small files
_EVEN, _MOST_BLUE = (255, 255, 255), (112, 172, 205)
_PLANES = {0: ("sagittal", "A", "P"), 1: ("coronal", "R", "L"), 2: ("axial", "R", "L")}
_PREFIX = "data:image/png;base64,"


@dataclass(frozen=True)
class HeatPicture:
    """One map over a slice. `heat` is a data URI stretched over the slice; `organ` is empty for received attention."""

    organ: str
    heat: str
    alt: str


@dataclass(frozen=True)
class ModelLooks:
    """One row of pictures: the delivered model, or a site's own."""

    name: str
    words: str
    pictures: tuple[HeatPicture, ...]


@dataclass(frozen=True)
class Shown:
    """Which slice of which case it is; organs that lie far apart need two."""

    site: str
    case: str
    number: int
    slices: int

    @property
    def words(self) -> str:
        """Which slice, if there are several."""
        return f"slice {self.number} of {self.slices}" if self.slices > 1 else ""


@dataclass(frozen=True)
class AttentionSlice:
    """One slice of a test case, seen by all models. `scan` is a data URI, `outlines` SVG paths in mm, by organ.

    `sides` are the letters at its left and right.
    """

    shown: Shown
    external: bool
    plane: str
    sides: tuple[str, str]
    organs: tuple[str, ...]
    scan: str
    width_mm: float
    height_mm: float
    ruler_mm: int
    outlines: Mapping[str, str]
    models: tuple[ModelLooks, ...]


@dataclass(frozen=True)
class AttentionPictures:
    """All slices. The strongest colour stands for `most_received` and `most_seen` times the average."""

    slices: tuple[AttentionSlice, ...]
    places: str
    most_received: int
    most_seen: int
    colours: str
    local: bool


@dataclass(frozen=True)
class HeadCell:
    """A site's share in one head, in words and as a colour."""

    text: str
    colour: str
    spoken: str


@dataclass(frozen=True)
class HeadTable:
    """λ of one round: per site a cell for every head of every layer. `heads` counts those of each layer."""

    round: int
    heads: tuple[int, ...]
    even: str
    rows: tuple[tuple[str, tuple[tuple[HeadCell, ...], ...]], ...]


def section(run: Run, cases: Callable[[], Mapping[CaseKey, Case]]) -> MethodSection | None:
    """Pictures and head weights, as far as the run has them."""
    pictures, missing = try_to_draw(lambda: attention_pictures(run, cases()))
    heads = head_table(run)
    if pictures is None and heads is None:
        return None
    content = {"attention": pictures, "missing": missing, "heads": heads}
    return MethodSection("attention", "What organs are found by", __package__ or "", "report.html.j2", content)


# -- pictures ----------------------------------------------------------------------------------------------------------


def attention_pictures(run: Run, cases: Mapping[CaseKey, Case]) -> AttentionPictures | None:
    """Slices of a few cases per site, as the delivered model and the kept models of single sites look at them.

    None where the model has no attention. Raises PanorganError or OSError where scans or models cannot be read.
    """
    if not has_attention(run.model_folder):
        return None
    model = load_model(run.model_folder, torch.device("cpu"))
    chosen = [key for key in choose_cases(run) if key in cases]
    patches = [
        (Shown(*key, number, len(found)), patch)
        for key in chosen
        if (found := list(patches_of(cases[key], model.plan, model.inference.patch_size)))
        for number, patch in enumerate(found, start=1)
    ]
    local = local_models(run, model)
    seen = [_looks(model.network, patches)]
    seen += [_looks(other.network(), patches) for other in local]
    rows = [("Global model", "delivered"), *((other.name, _labels(run, other.name)) for other in local)]
    every = [looks for of_model in seen for looks in of_model]
    if not every:
        return None
    tops = (
        scale_top([looks.received for looks in every]),
        scale_top([found for looks in every for found in looks.from_organ.values()]),
    )
    slices = tuple(
        _slice(run, shown, patch, model.plan, [(*rows[m], seen[m][index]) for m in range(len(rows))], tops)
        for index, (shown, patch) in enumerate(patches)
    )
    places = " × ".join(map(str, every[0].received.shape))
    return AttentionPictures(slices, places, *tops, heat_gradient(), bool(local))


def has_attention(model: Path) -> bool:
    """Whether the model in this folder has attention heads; read from the names of its weights."""
    try:
        if is_damaged(model / "model.safetensors"):
            return True  # loading it raises the error
        with safe_open(model / "model.safetensors", framework="pt") as file:
            return any(head_of_key(key) is not None for key in file.keys())  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError):
        return False


def choose_cases(run: Run) -> list[CaseKey]:
    """Per site the case with the median score and the worst one; with many sites the median alone, of some."""
    per_site = max(1, min(_CASES_PER_SITE, _MOST_CASES // max(1, len(run.sites))))
    # Many federations have few external sites; they should not be crowded out.
    names = [site.name for site in (*run.external_sites, *run.training_sites)][:_MOST_CASES]
    chosen: list[CaseKey] = []
    for site in (site.name for site in run.sites if site.name in names):
        scores: dict[str, list[float]] = {}
        for row in run.scores:
            if row["site"] == site:
                scores.setdefault(row["case"], []).append(row["dice"])
        ranked = sorted(scores, key=lambda case: (-sum(scores[case]) / len(scores[case]), case))
        wanted = [ranked[len(ranked) // 2], ranked[-1]] if ranked else []
        chosen += [(site, case) for case in dict.fromkeys(wanted[:per_site])]
    return chosen


def _looks(network: object, patches: Sequence[tuple[Shown, ScanPatch]]) -> list[Looks]:
    assert isinstance(network, InterOrganNetwork)  # its weights have the names of attention heads
    return [look(network, patch) for _, patch in patches]


def _labels(run: Run, site: str) -> str:
    labelled = next((known.labelled for known in run.training_sites if known.name == site), frozenset())
    return "labels " + ", ".join(title(organ) for organ in run.vocabulary if organ in labelled)


def _slice(
    run: Run,
    shown: Shown,
    patch: ScanPatch,
    plan: Plan,
    models: Sequence[tuple[str, str, Looks]],
    tops: tuple[int, int],
) -> AttentionSlice:
    mm_x, mm_y = (mm for axis, mm in enumerate(patch.spacing) if axis != patch.across)
    scan = radiological(patch.plane(patch.image).numpy())
    outlines = {o: outline(radiological(patch.plane(m).numpy() > 0), mm_x, mm_y) for o, m in patch.masks.items()}
    width, height = scan.shape[1] * mm_x, scan.shape[0] * mm_y
    organs = tuple(organ for organ in run.organs if organ in patch.masks)
    plane, *sides = _PLANES[patch.across]
    rows = []
    for name, words, looks in models:
        spoken = ", ".join(filter(None, (name, f"case {shown.case} of {shown.site}", shown.words)))
        maps = {"": looks.received, **{organ: looks.from_organ[organ] for organ in organs}}
        pictures = (_heat(o, found, patch, tops[1] if o else tops[0], spoken) for o, found in maps.items())
        rows.append(ModelLooks(name, words, tuple(pictures)))
    return AttentionSlice(
        shown,
        shown.site in {site.name for site in run.external_sites},
        plane,
        (sides[0], sides[1]),
        organs,
        encode_slice(scan, width, height, _window(scan, plan), _LONGEST_SIDE),
        width,
        height,
        ruler_length(width),
        outlines,
        tuple(rows),
    )


def _window(scan: NDArray[np.float32], plan: Plan) -> tuple[float, float]:
    """Black and white for a prepared scan: the abdominal window for CT, as on the page's other pictures."""
    if plan.intensity == "window":
        low, high = plan.window_hu
        dark, bright = ((max(low, min(hu, high)) - low) * 2 / (high - low) - 1 for hu in WINDOW_HU)
    else:
        dark, bright = (float(value) for value in np.percentile(scan, MR_PERCENTILES))
    return dark, max(bright, dark + 1e-6)


def _heat(organ: str, found: torch.Tensor, patch: ScanPatch, top: int, spoken: str) -> HeatPicture:
    inside = patch.network_view(patch.masks[organ]) if organ else None
    most = number(float(found.max()), 1)
    words = f"seen from {title(organ)}" if organ else "attention received"
    if inside is not None:
        words += f", {_share_inside(found, inside):.0%} of it inside the organ"
    heat = heat_rgba(radiological(on_plane(found, patch).numpy()), top)
    return HeatPicture(organ, _encode(heat), f"{spoken}: {words}; at most {most} times the average.")


def _share_inside(found: torch.Tensor, mask: torch.Tensor) -> float:
    """How much of a map falls into a mask."""
    covered = torch.nn.functional.interpolate(mask[None, None], size=tuple(found.shape), mode="area")[0, 0]
    return float((found * covered).sum() / found.sum())


# -- colours -----------------------------------------------------------------------------------------------------------


def scale_top(maps: Sequence[torch.Tensor]) -> int:
    """The power of two that holds all maps, at least 2: nearly even ones look even."""
    most = max((float(found.max()) for found in maps), default=1.0)
    return int(2 ** max(1, math.ceil(math.log2(max(most, 1.0)) - 1e-6)))


def heat_rgba(values: NDArray[np.floating], top: int) -> NDArray[np.uint8]:
    """Colours [rows, columns, 4] of values around 1: clear up to 1, then by doublings to the strongest at `top`."""
    strength = np.clip(np.log2(np.maximum(values, 1.0)) / math.log2(top), 0, 1)
    strength = np.round(strength * _STEPS) / _STEPS
    colours = _COLOURS(_DARKEST + (1 - _DARKEST) * strength)
    colours[..., 3] = _OPAQUE * np.minimum(1, 2 * strength)
    rgba: NDArray[np.uint8] = np.round(colours * 255).astype(np.uint8)
    return rgba


def heat_gradient() -> str:
    """The same colours on grey, from 1 to the top, as a CSS gradient."""
    ramp = heat_rgba(2.0 ** np.linspace(0, 1, 9)[None], 2)[0]
    stops = ", ".join(f"rgba({r}, {g}, {b}, {a / 255:.2f})" for r, g, b, a in ramp.tolist())
    return f"linear-gradient(to right, {stops}), linear-gradient(#777, #777)"


def _encode(rgba: NDArray[np.uint8]) -> str:
    file = io.BytesIO()
    imsave(file, rgba, format="png", metadata={"Software": "panorgan"})
    return _PREFIX + base64.b64encode(file.getvalue()).decode()


# -- heads -------------------------------------------------------------------------------------------------------------


def head_table(run: Run) -> HeadTable | None:
    """λ of the delivered round (of the last, where that is not known), from the log; None where heads have no λ."""
    importance: dict[str, dict[str, float]] = {}
    answered: tuple[str, ...] = ()
    done = 0
    for event in read_events(run.events_file):
        if event.kind != "round" or int(event.facts["number"]) > (run.delivered_round or math.inf):
            continue
        done, answered = int(event.facts["number"]), tuple(event.facts["sites"])
        for site, numbers in event.facts["sites"].items():
            sent = {name: value for name, value in numbers.items() if name.startswith(ATTRIBUTION)}
            importance |= {site: sent} if sent else {}
    known = {site: importance.get(site, {}) for site in answered}
    shares = head_weights(known, _weights(run, answered)) if any(known.values()) else {}
    if not shares:
        return None
    order = sorted(shares, key=_layer_and_head)
    heads = list(Counter(_layer_and_head(name)[0] for name in order).values())
    rows = []
    for site in answered:
        cells = iter([_head_cell(site, name, shares[name][site], len(answered)) for name in order])
        rows.append((site, tuple(tuple(next(cells) for _ in range(count)) for count in heads)))
    return HeadTable(done, tuple(heads), f"{100 / len(answered):.0f}", tuple(rows))


def _weights(run: Run, sites: Sequence[str]) -> dict[str, float]:
    """The weights of sites for parameters outside of heads."""
    if run.manifest["experiment"]["method"].get("weighting", "cases") != "cases":
        return dict.fromkeys(sites, 1.0)
    cases = {site.name: float(site.cases["train"]) for site in run.sites}
    return {site: cases[site] for site in sites}


def _layer_and_head(name: str) -> tuple[int, int]:
    layer, _, head = name.removeprefix(ATTRIBUTION).partition(".")
    return int(layer), int(head)


def _head_cell(site: str, name: str, share: float, sites: int) -> HeadCell:
    """White for nothing, the strongest blue from twice an even share on."""
    layer, head = _layer_and_head(name)
    strength = min(1.0, share * sites / 2)
    rgb = (round(a + (b - a) * strength) for a, b in zip(_EVEN, _MOST_BLUE, strict=True))
    text = f"{100 * share:.0f}" if share > 0 else NOTHING
    spoken = f"{site}, layer {layer + 1}, head {head + 1}: counts for {100 * share:.0f} percent"
    return HeadCell(text, "#" + "".join(f"{part:02x}" for part in rgb), spoken)
