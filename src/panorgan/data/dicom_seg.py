"""DICOM labels: what segments (DICOM-SEG) and contoured regions (RTSTRUCT) are called, and their masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panorgan.anatomy import Organ, ancestors, catalogue, find_organ
from panorgan.data.case import Mask, another_grid
from panorgan.data.formats import LPS_TO_RAS, POSITION_ROUNDING_MM, SLICE_TOLERANCE, functional_group, import_pydicom
from panorgan.data.rtstruct import outlined_regions, read_regions, region_codes
from panorgan.data.scan_size import check_room
from panorgan.data.volume import Volume
from panorgan.errors import AnatomyError, DataError

# How much larger or smaller a frame may be than the image's slice; the same as for label files.
_TOLERANCE_MM = 1e-2
# SNOMED CT is written in several schemes; pydicom knows the old codes as SRT.
_OLD_SNOMED = ("SNM3", "99SDM")
# A frame while it is unpacked and compared.
_PIXEL_BYTES = 4
_SIDES = {"left": "7771000", "right": "24028007"}


@dataclass(frozen=True, order=True)
class Segment:
    """One segment of one file; with `contours`, one region of an RTSTRUCT file."""

    path: Path
    number: int
    contours: bool = False


@dataclass(frozen=True)
class SegmentMasks:
    """Masks kept as segments of DICOM-SEG or regions of RTSTRUCT files: a voxel belongs where any of them holds it.

    Binary, fractional (one half or more counts) and label-map segmentations. Frames are put where they lie in the
    world; slices without a frame are empty.
    """

    segments: Mapping[str, tuple[Segment, ...]]

    @property
    def structures(self) -> tuple[str, ...]:
        """What it holds masks of."""
        return tuple(self.segments)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file once, in a stable order."""
        return tuple(sorted({segment.path for segments in self.segments.values() for segment in segments}))

    def recipe(self) -> str:
        """File names and segment numbers per structure."""
        return repr(sorted((name, [_recipe(segment) for segment in found]) for name, found in self.segments.items()))

    def read(self, image: Volume) -> Iterator[tuple[str, Mask]]:
        """Name and mask of every structure, on the grid of the image."""
        masks = {name: np.zeros(image.voxels.shape, dtype=bool) for name in self.segments}
        to_voxels = np.linalg.inv(image.affine)
        for path in self.paths:
            wanted = {s for segments in self.segments.values() for s in segments if s.path == path}
            numbers = {segment.number for segment in wanted}
            if any(segment.contours for segment in wanted):
                for number, mask in read_regions(path, numbers, image):
                    for name in self._held_by(Segment(path, number, contours=True)):
                        masks[name] |= mask
                continue
            for number, place, pixels in _frames(path, numbers):
                window, inside = _on_grid(to_voxels @ place, pixels, image, path)
                for name in self._held_by(Segment(path, number)):
                    masks[name][window] |= inside
        yield from masks.items()

    def _held_by(self, segment: Segment) -> list[str]:
        return [name for name, segments in self.segments.items() if segment in segments]


def _recipe(segment: Segment) -> tuple[Any, ...]:
    """A segment without its folder; contours are filled, which is another way to a mask."""
    return (segment.path.name, segment.number, *(["filled"] if segment.contours else []))


def _on_grid(place: NDArray[np.float64], pixels: Mask, image: Volume, path: Path) -> tuple[tuple[Any, ...], Mask]:
    """Index of the voxels that a frame's pixels are, and the pixels in that order. `place`: (column, row) → voxel."""
    rows, columns = pixels.shape
    along_row, along_column = (int(np.abs(place[:3, step]).argmax()) for step in (0, 1))
    if along_row == along_column:
        raise another_grid(path, "its slices lie oblique to the image's")
    across = 3 - along_row - along_column
    corners = np.array([[x, y, 0, 1] for x in (0, columns - 1) for y in (0, rows - 1)]) @ place.T[:, :3]
    voxels = np.rint(corners).astype(int)
    first, last = voxels[0], voxels[-1]
    # Positions are less exact than sizes and directions, because no stack is perfectly even.
    allowed = np.maximum(POSITION_ROUNDING_MM, SLICE_TOLERANCE * np.array(image.spacing))
    apart = (corners - voxels) * image.spacing
    moved = (np.abs(apart) > allowed).any() or (np.ptp(apart, axis=0) > _TOLERANCE_MM).any()
    steps = np.abs(last - first)
    if moved or (steps[along_row], steps[along_column], steps[across]) != (columns - 1, rows - 1, 0):
        raise another_grid(path, "its pixels have another size, direction or place than the image's voxels")
    if voxels.min() < 0 or (voxels.max(axis=0) >= image.voxels.shape).any():
        raise another_grid(path, "it reaches beyond the image")
    index = [first[axis : axis + 1] for axis in range(3)]
    index[along_row] = np.linspace(first[along_row], last[along_row], columns).astype(int)
    index[along_column] = np.linspace(first[along_column], last[along_column], rows).astype(int)
    return np.ix_(*index), np.expand_dims(pixels.T if along_row < along_column else pixels, across)


def _frames(path: Path, numbers: set[int]) -> Iterator[tuple[int, NDArray[np.float64], Mask]]:
    """Segment number, affine from (column, row) to RAS millimetres, and pixels [rows, columns] of every frame."""
    pydicom = import_pydicom()
    try:
        dataset = pydicom.dcmread(path)
        check_room(path, (dataset.Rows, dataset.Columns), _PIXEL_BYTES)
        for frame in range(int(dataset.get("NumberOfFrames") or 1)):
            if dataset.SegmentationType == "LABELMAP":
                stored = _pixels(dataset, frame)
                for number in sorted(numbers & set(np.unique(stored).tolist())):
                    yield number, _place(dataset, frame), stored == number
                continue
            number = int(functional_group(dataset, frame, "SegmentIdentificationSequence").ReferencedSegmentNumber)
            if number in numbers:
                half = 0.5 * float(dataset.get("MaximumFractionalValue", 1))
                yield number, _place(dataset, frame), _pixels(dataset, frame) >= half
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OSError, RuntimeError) as error:
        # pydicom raises many kinds: cut files, missing attributes, compressions without a plugin.
        raise DataError(
            "A DICOM segmentation cannot be read.",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix="Copy or export it again; its frames need positions in the patient. Or save it as NIfTI.",
            code="file-unreadable",
        ) from error


def _pixels(dataset: Any, frame: int) -> NDArray[Any]:
    """Stored values [rows, columns] of one frame."""
    shape = (int(dataset.Rows), int(dataset.Columns))
    if dataset.BitsAllocated != 1 or dataset.file_meta.TransferSyntaxUID.is_encapsulated:
        stored: NDArray[Any] = import_pydicom().pixels.pixel_array(dataset, index=frame)
        return stored.reshape(shape)
    # Eight pixels share a byte, and a frame may begin within one; pydicom fails there when it reads a single frame.
    count = shape[0] * shape[1]
    begin, end = frame * count, (frame + 1) * count
    packed = np.frombuffer(dataset.PixelData, dtype=np.uint8)[begin // 8 : -(-end // 8)]
    return np.unpackbits(packed, bitorder="little")[begin % 8 : begin % 8 + count].reshape(shape)


def _place(dataset: Any, frame: int) -> NDArray[np.float64]:
    """Affine from (column, row) of a frame to RAS millimetres."""
    position = functional_group(dataset, frame, "PlanePositionSequence").ImagePositionPatient
    directions = functional_group(dataset, frame, "PlaneOrientationSequence").ImageOrientationPatient
    row_mm, column_mm = functional_group(dataset, frame, "PixelMeasuresSequence").PixelSpacing
    along_row, along_column = np.array(directions, dtype=float).reshape(2, 3)
    affine = np.eye(4)
    # PixelSpacing names the distance between rows first.
    affine[:3, 0], affine[:3, 1] = along_row * float(column_mm), along_column * float(row_mm)
    affine[:3, 2], affine[:3, 3] = np.cross(along_row, along_column), np.array(position, dtype=float)
    return np.asarray(LPS_TO_RAS @ affine, dtype=np.float64)


def segment_names(dataset: Any) -> dict[int, str]:
    """Name of every segment, by number; the background of a label map is none."""
    segments = [s for s in dataset.get("SegmentSequence") or [] if int(s.SegmentNumber) != 0]
    return {int(segment.SegmentNumber): segment_name(segment) for segment in segments}


def region_names(dataset: Any) -> dict[int, str]:
    """Name of every region of an RTSTRUCT file that has a closed contour, by number."""
    from pydicom.dataset import Dataset

    codes = region_codes(dataset)
    names = {}
    for number, roi in outlined_regions(dataset).items():
        segment = Dataset()
        segment.SegmentNumber, segment.SegmentLabel = number, str(roi.get("ROIName") or f"region {number}")
        segment.SegmentedPropertyTypeCodeSequence = codes.get(number, [])
        names[number] = segment_name(segment)
    return names


def segment_name(segment: Any) -> str:
    """The name of a segment: its label where that says as much as its code, else the organ that it is coded as.

    A label that contradicts the code gives a name that says both and is no organ: a person has to decide.
    """
    label = str(segment.get("SegmentLabel") or f"segment {segment.SegmentNumber}").strip()
    coded = _coded_organ(segment)
    try:
        named = find_organ(label).name
    except AnatomyError:
        return coded or label
    if coded is None or coded in (named, *ancestors(named)):
        return label
    return coded if named in ancestors(coded) else f"{label} (coded as {coded})"


def _coded_organ(segment: Any) -> str | None:
    """The one organ with the segment's code and side; a tumour, cyst or inner vessel needs the organ it lies in."""
    types = _items(segment, "SegmentedPropertyTypeCodeSequence")
    regions = _items(segment, "AnatomicRegionSequence")
    modifiers = [m for item in types for m in _items(item, "SegmentedPropertyTypeModifierCodeSequence")]
    modifiers += [m for item in regions for m in _items(item, "AnatomicRegionModifierSequence")]
    sides = [side for side, value in _SIDES.items() if _is_any(modifiers, value)]

    def fits(organ: Organ) -> bool:
        if not organ.snomed_value or not _is_any(types, organ.snomed_value):
            return False
        of_any_organ = organ.relation == "inside" and organ.kind in ("tumour", "cyst", "vessel")
        if of_any_organ and not _is_any(regions, catalogue()[str(organ.parent)].snomed_value):
            return False
        if organ.modifier_value:
            return len(sides) < 2 and _is_any(modifiers, organ.modifier_value)
        # One side of an organ that we know only as a whole is not the organ.
        return len(sides) != 1 or sides == [organ.side]

    found = [organ for organ in catalogue().values() if fits(organ)]
    # The left kidney is coded as a kidney too.
    found = [organ for organ in found if organ.modifier_value] or found
    return found[0].name if len(found) == 1 else None


def _items(dataset: Any, name: str) -> list[Any]:
    return list(dataset.get(name) or [])


def _is_any(codes: list[Any], snomed: str) -> bool:
    """Whether one of the coded items is this SNOMED CT concept, in new or old codes."""
    from pydicom.sr.coding import Code

    for item in codes:
        value, scheme = str(item.get("CodeValue") or ""), str(item.get("CodingSchemeDesignator") or "")
        if Code(value, "SRT" if scheme in _OLD_SNOMED else scheme, "") == Code(snomed, "SCT", ""):
            return True
    return False
