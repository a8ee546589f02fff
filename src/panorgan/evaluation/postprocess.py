"""Clean predicted masks: fill holes, drop stray components, keep tumours inside their organ.

`pieces` is the default: what a site does not label, it does not keep in its place. The other presets name the cleaning
that a paper reports, so that its figures can be compared. Components are joined by faces, edges and corners; background
is joined by faces only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from panorgan.anatomy import ancestors, catalogue, children, find_organ
from panorgan.errors import ConfigError, DataError, did_you_mean

BoolArray = NDArray[np.bool_]
Masks = Mapping[str, BoolArray]

PIECES_FRACTION = 0.5
UFPS_COMPONENT_FRACTION = 0.2
FLKD_TUMOUR_VOXELS = 50


def fill_holes(mask: BoolArray) -> BoolArray:
    """The 2D or 3D mask with every background region filled that does not reach the image border."""
    filled = mask.copy()
    if mask.any():
        # A hole lies within the bounding box, and a region that touches the side of the box is open.
        box = ndimage.find_objects(mask.view(np.uint8))[0]
        filled[box] = ndimage.binary_fill_holes(mask[box])
    return filled


def drop_small_components(mask: BoolArray, fraction: float) -> BoolArray:
    """The mask without components smaller than this fraction of its largest one."""
    if not 0 <= fraction <= 1:
        raise ConfigError(
            f"The component fraction is {fraction}.", code="bad-component-fraction", fix="Use a number from 0 to 1."
        )
    kept = mask.copy()
    if mask.any():
        box = ndimage.find_objects(mask.view(np.uint8))[0]
        labels, sizes = _components(mask[box])
        kept[box] = _select(labels, sizes >= fraction * sizes.max())
    return kept


def drop_components_up_to(mask: BoolArray, voxels: int) -> BoolArray:
    """The mask without components of this many voxels or fewer."""
    labels, sizes = _components(mask)
    return _select(labels, sizes > voxels)


def keep_largest(mask: BoolArray, k: int = 1) -> BoolArray:
    """The k largest components of the mask. Of two equal ones, the first in the array stays."""
    if k < 1:
        raise ConfigError(f"{k} components cannot be kept.", code="bad-component-count", fix="Use a positive number.")
    labels, sizes = _components(mask)
    kept = np.zeros(len(sizes), dtype=bool)
    kept[np.argsort(-sizes, kind="stable")[:k]] = True
    return _select(labels, kept)


def inside(tumour: BoolArray, organ: BoolArray) -> BoolArray:
    """The tumour voxels that lie in the organ. The organ's mask must include its tumour."""
    kept: BoolArray = tumour & organ
    return kept


def none(masks: Masks) -> dict[str, BoolArray]:
    """Leave every mask as it is."""
    return {name: mask.copy() for name, mask in masks.items()}


def pieces(masks: Masks) -> dict[str, BoolArray]:
    """Of organs that hang together, drop pieces less than half as large as the largest.

    An organ that the border of a scan cuts into similar pieces keeps them. Pairs, lungs, vessels, bowel, other thin
    tubes, tumours and cysts are left alone: there a small piece may be real, such as a shrunken kidney.
    """
    return {
        name: drop_small_components(mask, PIECES_FRACTION) if catalogue()[name].one_piece else mask.copy()
        for name, mask in masks.items()
    }


def ufps(masks: Masks) -> dict[str, BoolArray]:
    """Fill holes, then drop components below 20 % of the organ's largest.

    A filled hole may hold another organ; which one wins is decided where masks become a label map.
    """
    return {name: drop_small_components(fill_holes(mask), UFPS_COMPONENT_FRACTION) for name, mask in masks.items()}


def flkd(masks: Masks) -> dict[str, BoolArray]:
    """Keep an organ's largest component, two for a pair; cut tumours to it and drop those up to 50 voxels.

    Other structures inside an organ (vessels, cysts) come in many pieces and are left alone. A tumour whose organ is
    not among the masks is only cleaned of small components.
    """
    cleaned: dict[str, BoolArray] = {}
    for name, mask in masks.items():
        is_inner = catalogue()[name].relation == "inside"
        cleaned[name] = mask.copy() if is_inner else keep_largest(mask, 2 if _is_pair(name) else 1)
    for name in masks:
        organ = catalogue()[name]
        if organ.kind != "tumour":
            continue
        host = _extent(organ.parent, cleaned) if organ.parent else None
        tumour = cleaned[name] if host is None else inside(cleaned[name], host)
        cleaned[name] = drop_components_up_to(tumour, FLKD_TUMOUR_VOXELS)
    return cleaned


PRESETS: Mapping[str, Callable[[Masks], dict[str, BoolArray]]] = MappingProxyType(
    {"none": none, "pieces": pieces, "ufps": ufps, "flkd": flkd}
)


def apply_preset(name: str, masks: Masks, *, exclusive: bool = False) -> dict[str, BoolArray]:
    """Clean the masks of one case with a named preset; the given masks are not changed.

    Parameters
    ----------
    name : a key of `PRESETS`.
    masks : organ name → bool array, all of one shape, (H, W) or (D, H, W).
    exclusive : each voxel has one organ, so an organ's mask leaves out the tumours and vessels inside it.
        They are then added while cleaning (otherwise no tumour would lie in its organ) and removed later.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"There is no post-processing preset {name!r}.",
            code="unknown-preset",
            fix=did_you_mean(name, PRESETS) or f"Use one of: {', '.join(PRESETS)}.",
        )
    _check(masks)
    if name == "none" or not exclusive:
        return PRESETS[name](masks)
    cleaned = PRESETS[name]({organ: _with_inner(organ, masks) for organ in masks})
    return {
        organ: reduce(lambda rest, inner: rest & ~cleaned[inner], _inner_names(organ, masks), mask)
        for organ, mask in cleaned.items()
    }


def clean_label_map(
    name: str, labels: NDArray[np.uint8], organs: Sequence[str], paint_order: Iterable[str]
) -> NDArray[np.uint8]:
    """A label map after a preset. Organ i has the label i + 1; where organs overlap, the last of `paint_order` wins."""
    if name == "none":
        return labels
    if name == "pieces":
        return _without_small_pieces(labels, organs)
    masks = {organ: labels == place for place, organ in enumerate(organs, start=1)}
    cleaned, result = apply_preset(name, masks, exclusive=True), np.zeros_like(labels)
    for organ in paint_order:
        result[cleaned[organ]] = organs.index(organ) + 1
    return result


def compares_organs(name: str, organs: Sequence[str]) -> bool:
    """Whether a preset looks at other organs of a label map, too, when it cleans one."""
    return name != "none" and (name != "pieces" or any(_inner_names(organ, organs) for organ in organs))


def _without_small_pieces(labels: NDArray[np.uint8], organs: Sequence[str]) -> NDArray[np.uint8]:
    """`pieces` as in `apply_preset`, organ by organ within its box: no mask of a large scan for every organ."""
    result, boxes = labels.copy(), ndimage.find_objects(labels, max_label=len(organs))
    for organ, box in zip(organs, boxes, strict=True):
        if box is None or not catalogue()[organ].one_piece:
            continue
        places = {name: organs.index(name) for name in (organ, *_inner_names(organ, organs))}
        around = _around(boxes[place] for place in places.values())
        masks = {name: labels[around] == place + 1 for name, place in places.items()}
        kept = drop_small_components(_with_inner(organ, masks), PIECES_FRACTION)
        result[around][masks[organ] & ~kept] = 0
    return result


def _around(boxes: Iterable[tuple[slice, ...] | None]) -> tuple[slice, ...]:
    """The box around these boxes."""
    axes = zip(*(box for box in boxes if box is not None), strict=True)
    return tuple(slice(min(one.start for one in axis), max(one.stop for one in axis)) for axis in axes)


def _components(mask: BoolArray) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Component number per voxel (0 is background), and the size of each component."""
    labels, _ = ndimage.label(mask, structure=np.ones((3,) * mask.ndim))
    return labels, np.bincount(labels.ravel())[1:]


def _select(labels: NDArray[np.integer], kept: BoolArray) -> BoolArray:
    chosen: BoolArray = np.concatenate([[False], kept])[labels]
    return chosen


def _is_pair(name: str) -> bool:
    """Whether the organ is the union of a left and a right one, such as `kidney`."""
    return {catalogue()[part].side for part in children(name, "part")} == {"left", "right"}


def _extent(name: str, masks: Masks) -> BoolArray | None:
    """The mask of an organ, or the union of its parts when all of them are there."""
    if name in masks:
        return masks[name]
    parts = [_extent(part, masks) for part in children(name, "part")]
    known = [part for part in parts if part is not None]
    if not parts or len(known) < len(parts):
        return None
    union: BoolArray = np.logical_or.reduce(known)
    return union


def _with_inner(organ: str, masks: Masks) -> BoolArray:
    """An organ together with those structures inside it that touch it."""
    inner_names = _inner_names(organ, masks)
    if not inner_names:
        return masks[organ]
    labels, sizes = _components(np.logical_or.reduce([masks[organ], *(masks[inner] for inner in inner_names)]))
    touched = np.bincount(labels[masks[organ]], minlength=len(sizes) + 1)[1:] > 0
    return _select(labels, touched)


def _inner_names(organ: str, masks: Iterable[str]) -> list[str]:
    """The structures among the masks that lie inside an organ, or inside the union it is a part of."""
    unions = _unions(organ)
    return [
        name
        for name in masks
        if catalogue()[name].relation == "inside" and (organ in ancestors(name) or catalogue()[name].parent in unions)
    ]


def _unions(name: str) -> list[str]:
    """What an organ is a part of, nearest first."""
    found = []
    organ = catalogue()[name]
    while organ.relation == "part" and organ.parent is not None:
        found.append(organ.parent)
        organ = catalogue()[organ.parent]
    return found


def _check(masks: Masks) -> None:
    for name, mask in masks.items():
        if name not in catalogue():
            # Raises an error with a hint for an unknown name; an alias would bypass the rules for tumours.
            known = find_organ(name).name
            raise DataError(
                f"The mask {name!r} goes by an alias.", code="organ-alias", fix=f"Use the organ's name, {known!r}."
            )
        if mask.dtype != np.bool_:
            raise DataError(
                f"The mask of {name!r} is {mask.dtype}, not bool.",
                code="mask-not-bool",
                fix="Compare it with its label.",
            )
    shapes = {mask.shape for mask in masks.values()}
    if len(shapes) > 1:
        raise DataError(
            f"The masks of one case have different shapes: {', '.join(map(str, sorted(shapes)))}.",
            code="shapes-differ",
            fix="Bring all masks of a case to one grid.",
        )
