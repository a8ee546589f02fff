"""Faults of intensities, label values and masks."""

from __future__ import annotations

import numpy as np
from fault_bench import ORGANS, Array, Bench, Where, fault, load
from scipy import ndimage


@fault("hu-offset")
def intercept_not_applied(bench: Bench) -> Where:
    bench.edit(bench.image, lambda v: v + 1024)
    return bench.case


@fault("hu-offset")
def intercept_applied_twice(bench: Bench) -> Where:
    bench.edit(bench.image, lambda v: v - 1024)
    return bench.case


@fault("hu-scale")
def slope_doubled(bench: Bench) -> Where:
    bench.edit(bench.image, lambda v: v * 2)
    return bench.case


@fault("hu-scale")
def slope_halved(bench: Bench) -> Where:
    bench.edit(bench.image, lambda v: v / 2)
    return bench.case


@fault("hu-lost")
def windowed_to_8_bits(bench: Bench) -> Where:
    low, width = bench.rng.uniform(-250, -100), bench.rng.uniform(300, 500)
    bench.edit(bench.image, lambda v: np.clip((v - low) / width, 0, 1) * 255, np.uint8)
    return bench.case


@fault("hu-lost")
def normalised(bench: Bench) -> Where:
    bench.edit(bench.image, lambda v: (v - v.mean()) / v.std(), np.float32)
    return bench.case


@fault("hu-clipped")
def clipped_to_a_window(bench: Bench) -> Where:
    low, high = bench.rng.uniform(-250, -120), bench.rng.uniform(180, 300)
    bench.edit(bench.image, lambda v: np.clip(v, low, high))
    return bench.case


@fault("hu-overflow")
def signed_read_as_unsigned(bench: Bench) -> Where:
    bench.edit(bench.image, lambda v: v.astype(np.int16).view(np.uint16), np.uint16)
    return bench.case


@fault("hu-organ")
def organ_of_fat(bench: Bench) -> Where:
    organ = bench.rng.choice(["liver", "spleen", "kidney_left"])
    mask = load(bench.label)[0] == bench.ids[str(organ)]
    bench.edit(bench.image, lambda v: np.where(mask, bench.rng.integers(-150, -90), v))
    return bench.case


@fault("intensity-outlier", cases=9)
def brighter_than_its_siblings(bench: Bench) -> Where:
    bench.edit(bench.image, lambda v: v + 135)
    return bench.case


def _as_mr(voxels: Array) -> Array:
    return np.maximum(voxels + 1000.0, 0) / 3.1


@fault("modality-mismatch")
def mr_declared_as_ct(bench: Bench) -> Where:
    bench.edit(bench.image, _as_mr)
    return bench.case


@fault("modality-mismatch")
def ct_declared_as_mr(bench: Bench) -> Where:
    bench.describe(channel_names={"0": "T1w MRI"})
    return tuple(bench.cases)


@fault("mixed-modality")
def mr_among_ct(bench: Bench) -> Where:
    bench.as_table()
    bench.edit(bench.image, _as_mr)
    return bench.case


@fault("label-nearly-whole")
def labels_of_0_999(bench: Bench) -> Where:
    away = bench.rng.uniform(1e-4, 1e-3)
    bench.edit(bench.label, lambda v: v * (1 - away), np.float32)
    return bench.case


@fault("label-not-whole")
def interpolated_labels(bench: Bench) -> Where:
    bench.edit(bench.label, lambda v: ndimage.gaussian_filter(v.astype(np.float32), 0.7), np.float32)
    return bench.case


@fault("label-not-whole")
def nan_in_label(bench: Bench) -> Where:
    bench.edit(bench.label, lambda v: np.where(v == v.max(), np.nan, v), np.float32)
    return bench.case


@fault("stray-label")
def stray_id(bench: Bench) -> Where:
    number = int(bench.rng.integers(20, 250))
    count = int(bench.rng.integers(1, 30))
    bench.edit(bench.label, lambda v: np.where(np.arange(v.size).reshape(v.shape) < count, number, v))
    return bench.case


@fault("negative-label")
def negative_id(bench: Bench) -> Where:
    bench.edit(bench.label, lambda v: np.where(v == bench.ids["liver"], v, -v.astype(np.int16)), np.int16)
    return bench.case


@fault("empty-mask")
def empty_mask(bench: Bench) -> Where:
    bench.paint(str(bench.rng.choice(ORGANS[:7])), lambda mask, hu: np.zeros_like(mask))
    return bench.case


@fault("empty-mask", cases=9)
def empty_in_many_cases(bench: Bench) -> Where:
    for case in bench.cases[:5]:
        bench.case = case
        bench.paint("gallbladder", lambda mask, hu: np.zeros_like(mask))
    return ""


@fault("never-annotated")
def declared_but_never_drawn(bench: Bench) -> Where:
    bench.describe(labels=bench.ids | {"aorta": 20})
    return ""


@fault("tiny-mask")
def one_voxel_mask(bench: Bench) -> Where:
    bench.paint(str(bench.rng.choice(ORGANS[:4])), _one_voxel)
    return bench.case


def _one_voxel(mask: Array, hu: Array) -> Array:
    middle = np.argwhere(mask)[np.count_nonzero(mask) // 2]
    one = np.zeros_like(mask)
    one[tuple(middle)] = True
    return one


@fault("huge-mask")
def huge_mask(bench: Bench) -> Where:
    labels = load(bench.label)[0]
    bench.paint("pancreas", lambda mask, hu: ndimage.binary_dilation(mask, iterations=8) & ((labels == 0) | mask))
    return bench.case


@fault("huge-mask")
def inside_and_outside_swapped(bench: Bench) -> Where:
    labels = load(bench.label)[0]
    bench.paint("gallbladder", lambda mask, hu: labels == 0)
    return bench.case


@fault("overlapping-masks")
def overlapping_masks(bench: Bench) -> Where:
    masks = bench.as_mask_files() / bench.case / "segmentations"
    grown = int(bench.rng.integers(1, 3))
    bench.edit(masks / "spleen.nii.gz", lambda v: ndimage.binary_dilation(v > 0, iterations=grown + 2))
    return bench.case


@fault("mask-in-air")
def mask_in_air(bench: Bench) -> Where:
    """Half of the liver is drawn into the air at the patient's right."""

    def move(mask: Array, hu: Array) -> Array:
        air = np.argwhere((hu < -900) & (np.arange(hu.shape[0]) < 6)[:, None, None])
        count = int(np.count_nonzero(mask) * bench.rng.uniform(0.5, 1.0))
        mask[tuple(air[:count].T)] = True
        return mask

    bench.paint("liver", move)
    return bench.case


@fault("far-piece")
def far_second_piece(bench: Bench) -> Where:
    """A block of spleen in front of it, in the belly's left half."""

    def add(mask: Array, hu: Array) -> Array:
        x = int(np.argwhere(mask)[:, 0].mean())
        size = int(bench.rng.integers(3, 5))
        mask[x - size : x, 5 : 5 + size, 3 : 3 + size] = True
        return mask

    bench.paint("spleen", add)
    return bench.case


@fault("specks")
def specks(bench: Bench) -> Where:
    labels = load(bench.label)[0]

    def scatter(mask: Array, hu: Array) -> Array:
        near = (
            ndimage.binary_dilation(mask, iterations=4) & ~ndimage.binary_dilation(mask, iterations=1) & (labels == 0)
        )
        grid = np.zeros_like(mask)
        grid[::3, ::3, ::3] = True
        places = np.argwhere(near & grid)
        chosen = places[bench.rng.permutation(len(places))[:45]]
        mask[tuple(chosen.T)] = True
        return mask

    bench.paint("liver", scatter)
    return bench.case


@fault("label-misplaced")
def image_flipped_alone(bench: Bench) -> Where:
    """Its header and the label stay: every number agrees, and nothing fits."""
    axis = int(bench.rng.integers(3))
    bench.edit(bench.image, lambda v: np.flip(v, axis))
    return bench.case


@fault("label-misplaced")
def label_content_shifted(bench: Bench) -> Where:
    axis, distance = int(bench.rng.integers(2)), int(bench.rng.integers(2, 7)) * int(bench.rng.choice([-1, 1]))
    bench.edit(bench.label, lambda v: np.roll(v, distance, axis))
    return bench.case


@fault("label-misplaced")
def label_turned_by_half(bench: Bench) -> Where:
    bench.edit(bench.label, lambda v: v[::-1, ::-1])
    # Organs then lie on the wrong side too, which is an error of its own; one organ in the middle says nothing of it.
    bench.edit(bench.label, lambda v: np.where(v == bench.ids["lung"], v, 0))
    return bench.case


@fault("odd-place")
def transplanted_kidney(bench: Bench) -> Where:
    """The only kidney lies at the front, as one does that was put into the pelvis."""
    labels = load(bench.label)[0]
    kidney = labels == bench.ids["kidney_right"]
    moved = np.roll(kidney, 2 - int(np.argwhere(kidney)[:, 1].min()), axis=1)
    without = np.where(np.isin(labels, (bench.ids["kidney_left"], bench.ids["kidney_right"])), 0, labels)
    bench.edit(bench.label, lambda v: np.where(moved, bench.ids["kidney_right"], without))
    return bench.case


@fault("hu-overflow")
def air_wrapped_around(bench: Bench) -> Where:
    """Twelve bits without a sign: −1000 HU became 3096."""
    bench.edit(bench.image, lambda v: np.where(v < -900, v + 4096, v))
    return bench.case


@fault("repeated-slices")
def slices_written_again(bench: Bench) -> Where:
    order = np.arange(load(bench.image)[0].shape[2])
    order[8 : 8 + int(bench.rng.integers(3, 8))] = 8
    bench.edit(bench.image, lambda v: v[:, :, order])
    return bench.case


@fault("one-slice")
def one_slice_of_a_volume(bench: Bench) -> Where:
    middle = int(np.argwhere(load(bench.label)[0] == bench.ids["liver"])[:, 2].mean())
    for path in (bench.image, bench.label):
        bench.edit(path, lambda v: v[:, :, middle : middle + 1])
    return bench.case


@fault("repeated-slices")
def slice_not_written(bench: Bench) -> Where:
    middle = int(np.argwhere(load(bench.label)[0] == bench.ids["liver"])[:, 2].mean())
    bench.edit(bench.image, lambda v: np.where(np.arange(v.shape[2]) == middle, -1024, v))
    return bench.case


@fault("mask-not-binary")
def mask_file_of_two_values(bench: Bench) -> Where:
    masks = bench.as_mask_files() / bench.case / "segmentations"
    bench.edit(masks / "liver.nii.gz", lambda v: v * np.where(np.arange(v.shape[0]) % 2, 1, 2)[:, None, None])
    return bench.case


@fault("mask-not-binary")
def interpolated_mask_file(bench: Bench) -> Where:
    masks = bench.as_mask_files() / bench.case / "segmentations"
    bench.edit(masks / "liver.nii.gz", lambda v: ndimage.gaussian_filter(v.astype(np.float32), 0.7), np.float32)
    return bench.case


@fault("stray-label")
def id_beyond_all_integers(bench: Bench) -> Where:
    number = float(bench.rng.choice([1e12, 1e30]))
    bench.edit(bench.label, lambda v: np.where(np.arange(v.size).reshape(v.shape) < 9, number, v), np.float64)
    return bench.case


@fault("stray-label")
def image_saved_as_label(bench: Bench) -> Where:
    bench.edit(bench.label, lambda v: load(bench.image)[0] + 1024, np.int16)
    return bench.case


@fault("never-annotated")
def declared_with_a_huge_id(bench: Bench) -> Where:
    bench.describe(labels=bench.ids | {"aorta": 2**40})
    return ""


@fault("empty-mask")
def empty_label(bench: Bench) -> Where:
    bench.edit(bench.label, np.zeros_like)
    return bench.case
