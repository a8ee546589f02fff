"""Faults of headers, grids and files."""

from __future__ import annotations

import gzip
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
from fault_bench import SITE, Array, Bench, Where, fault, load, save
from scipy import ndimage

from panorgan.phantom import PhantomConfig, PhantomSite, write_federation


def _both(bench: Bench, change: Callable[[Array], Array]) -> str:
    for path in (bench.image, bench.label):
        bench.turn(path, change)
    return bench.case


def _mirror(axis: int) -> Callable[[Array], Array]:
    turn = np.eye(4)
    turn[axis, axis] = -1
    return lambda affine: turn @ affine


@fault("wrong-side")
def flipped_left_right(bench: Bench) -> Where:
    return _both(bench, _mirror(0))


@fault("wrong-order")
def flipped_front_back(bench: Bench) -> Where:
    return _both(bench, _mirror(1))


@fault("body-turned")
def flipped_front_back_where_one_organ_is_labelled(bench: Bench) -> Where:
    """One organ says nothing about front and back: the spine and the table do."""
    site = PhantomSite(name=SITE, annotated=("liver",), cases=4, spacing_mm=(4.5, 4.5, 5.0))
    bench.folder = write_federation(PhantomConfig(sites=(site,), seed=9), bench.folder.parent / "one_organ")[SITE]
    bench.source = replace(bench.source, folder=bench.folder)
    bench.cases = sorted(path.name.removesuffix(".nii.gz") for path in (bench.folder / "labelsTr").iterdir())
    bench.case = str(bench.rng.choice(bench.cases))
    return _both(bench, _mirror(1))


@fault("wrong-order")
def upside_down(bench: Bench) -> Where:
    return _both(bench, _mirror(2))


@fault("wrong-side")
def swapped_left_and_right_ids(bench: Bench) -> Where:
    left, right = bench.ids["kidney_left"], bench.ids["kidney_right"]
    bench.edit(bench.label, lambda v: np.where(v == left, right, np.where(v == right, left, v)))
    return bench.case


@fault("wrong-side")
def lone_kidney_on_the_wrong_side(bench: Bench) -> Where:
    """Only one kidney is there, and it is called by the other's name."""
    left, right = bench.ids["kidney_left"], bench.ids["kidney_right"]
    bench.edit(bench.label, lambda v: np.where(v == left, 0, np.where(v == right, left, v)))
    return bench.case


@fault("shape-mismatch")
def label_on_another_grid(bench: Bench) -> Where:
    factor = bench.rng.uniform(1.3, 2.0)
    voxels, affine = load(bench.label)
    finer = ndimage.zoom(voxels, factor, order=0)
    scale = np.array(voxels.shape) / np.array(finer.shape)
    save(bench.label, finer, affine @ np.diag([*scale, 1.0]))
    return bench.case


@fault("shape-mismatch")
def transposed_label(bench: Bench) -> Where:
    bench.edit(bench.label, lambda v: np.ascontiguousarray(v.transpose(1, 0, 2)))
    return bench.case


@fault("shape-mismatch")
def label_without_its_last_slices(bench: Bench) -> Where:
    count = int(bench.rng.integers(1, 4))
    bench.edit(bench.label, lambda v: v[:, :, :-count])
    return bench.case


@fault("origin-mismatch")
def shifted_origin(bench: Bench) -> Where:
    shift = bench.rng.uniform(0.5, 40.0, 3)
    bench.turn(bench.label, lambda a: a + np.array([[0, 0, 0, s] for s in shift] + [[0, 0, 0, 0]]))
    return bench.case


@fault("spacing-mismatch")
def label_with_another_spacing(bench: Bench) -> Where:
    factor = bench.rng.uniform(1.05, 1.6)
    bench.turn(bench.label, lambda a: a @ np.diag([1, 1, factor, 1]))
    return bench.case


@fault("direction-mismatch")
def oblique_label(bench: Bench) -> Where:
    bench.turn(bench.label, lambda a: _rotation(bench.rng.uniform(1, 20)) @ a)
    return bench.case


@fault("direction-mismatch")
def label_header_flipped(bench: Bench) -> Where:
    bench.turn(bench.label, lambda a: a @ np.diag([1, -1, 1, 1]))
    return bench.case


@fault("grid-mismatch")
def label_turned_by_a_hair(bench: Bench) -> Where:
    def turn(affine: Array) -> Array:
        turned = _rotation(0.02) @ affine
        turned[:3, 3] = affine[:3, 3]
        return turned

    bench.turn(bench.label, turn)
    return bench.case


def _rotation(degrees: float) -> Array:
    angle = np.radians(degrees)
    turn = np.eye(4)
    turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return turn


@fault("implausible-spacing")
def spacing_in_metres(bench: Bench) -> Where:
    return _both(bench, lambda a: np.diag([0.001, 0.001, 0.001, 1]) @ a)


@fault("implausible-spacing")
def spacing_in_micrometres(bench: Bench) -> Where:
    return _both(bench, lambda a: np.diag([1000.0, 1000.0, 1000.0, 1]) @ a)


@fault("bad-affine")
def flat_affine(bench: Bench) -> Where:
    _write_rows(bench.image, lambda rows: rows * np.array([1, 1, 0, 1]))
    return bench.case


@fault("bad-affine")
def affine_with_nan(bench: Bench) -> Where:
    _write_rows(bench.image, lambda rows: np.where(np.eye(3, 4) > 0, np.nan, rows))
    return bench.case


def _write_rows(path: Path, change: Callable[[Array], Array]) -> None:
    """Change the sform's rows in the file's bytes; no library would write such a header."""
    content = bytearray(gzip.decompress(path.read_bytes()))
    rows = np.frombuffer(bytes(content[280:328]), dtype="<f4").reshape(3, 4)
    content[280:328] = change(rows).astype("<f4").tobytes()
    path.write_bytes(gzip.compress(bytes(content)))


@fault("forms-disagree")
def qform_and_sform_disagree(bench: Bench) -> Where:
    voxels, affine = load(bench.image)
    image = nib.Nifti1Image(voxels, affine)
    image.set_sform(affine, code=1)
    shifted = affine.copy()
    shifted[:3, 3] += bench.rng.uniform(10, 50, 3)
    image.set_qform(shifted, code=1)
    nib.save(image, bench.image)
    return bench.case


@fault("no-orientation")
def no_orientation(bench: Bench) -> Where:
    """Turned so that the voxels still lie where nibabel guesses them: only the header is silent."""
    for path in (bench.image, bench.label):
        voxels, affine = load(path)
        turned = nib.as_closest_canonical(nib.Nifti1Image(voxels, affine))
        flipped = np.asanyarray(turned.dataobj)[::-1]  # nibabel's guess is that x runs to the left
        image = nib.Nifti1Image(flipped, None)
        image.header.set_zooms((8.0, 8.0, 8.0))
        nib.save(image, path)
    return bench.case


@fault("spacing-outlier", cases=9)
def spacing_outlier(bench: Bench) -> Where:
    factor = bench.rng.uniform(2.2, 3.0)
    return _both(bench, lambda a: np.diag([1, 1, factor, 1]) @ a)


@fault("not-3d")
def time_series(bench: Bench) -> Where:
    bench.edit(bench.image, lambda v: np.stack([v] * int(bench.rng.integers(2, 5)), axis=-1))
    return bench.case


@fault("singleton-axis")
def needless_axis(bench: Bench) -> Where:
    bench.edit(bench.label if bench.rng.random() < 0.5 else bench.image, lambda v: v[..., None])
    return bench.case


def _cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


@fault("file-unreadable")
def truncated_image(bench: Bench) -> Where:
    _cut(bench.image, bench.rng.uniform(0.05, 0.95))
    return bench.case


@fault("file-unreadable")
def truncated_label(bench: Bench) -> Where:
    _cut(bench.label, bench.rng.uniform(0.3, 0.9))
    return bench.case


@fault("file-unreadable")
def empty_file(bench: Bench) -> Where:
    bench.image.write_bytes(b"")
    return bench.case


@fault("too-large")
def header_of_a_giant(bench: Bench) -> Where:
    """A few kilobytes that claim eight terabytes."""
    path = bench.image if bench.rng.random() < 0.5 else bench.label
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[42:48] = struct.pack("<3h", 20000, 20000, 20000)
    path.write_bytes(gzip.compress(bytes(content)))
    return bench.case


@fault("image-missing")
def listed_image_missing(bench: Bench) -> Where:
    bench.as_table()
    bench.image.unlink()
    return bench.case


@fault("label-missing")
def label_missing(bench: Bench) -> Where:
    bench.label.unlink()
    return bench.case


@fault("orphan-label")
def label_without_image(bench: Bench) -> Where:
    shutil.copy(bench.label, bench.label_of("somebody_else"))
    return "somebody_else"


@fault("unlabelled")
def masks_missing(bench: Bench) -> Where:
    shutil.rmtree(bench.as_mask_files() / bench.case / "segmentations")
    return bench.case


@fault("not-greyscale")
def coloured_image(bench: Bench) -> Where:
    voxels, affine = load(bench.image)
    colours = np.zeros(voxels.shape, dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")])
    nib.save(nib.Nifti1Image(colours, affine), bench.image)
    return bench.case


@fault("not-finite")
def nan_in_image(bench: Bench) -> Where:
    def spoil(voxels: Array) -> Array:
        spoilt = voxels.astype(np.float32)
        places = bench.rng.integers(0, spoilt.size, int(bench.rng.integers(1, 200)))
        spoilt.reshape(-1)[places] = bench.rng.choice([np.nan, np.inf, -np.inf])
        return spoilt

    bench.edit(bench.image, spoil, np.float32)
    return bench.case


@fault("constant-image")
def constant_image(bench: Bench) -> Where:
    value = int(bench.rng.choice([-1024, 0, 7]))
    bench.edit(bench.image, lambda v: np.full_like(v, value))
    return bench.case


@fault("sheared")
def sheared_axes(bench: Bench) -> Where:
    """As a tilted gantry is written by some converters."""
    shear = np.eye(4)
    shear[1, 2] = np.tan(np.radians(bench.rng.uniform(0.5, 20)))
    return _both(bench, lambda affine: shear @ affine)


@fault("forms-disagree")
def qform_that_is_no_rotation(bench: Bench) -> Where:
    content = bytearray(gzip.decompress(bench.image.read_bytes()))
    value = bench.rng.choice([0.9, np.nan])
    content[256:268] = np.full(3, value, dtype="<f4").tobytes()
    bench.image.write_bytes(gzip.compress(bytes(content)))
    return bench.case


@fault("image-missing")
def path_beyond_all_lengths(bench: Bench) -> Where:
    bench.as_table()
    table = bench.source.folder / "cases.csv"
    table.write_text(table.read_text().replace(f"../imagesTr/{bench.case}_0000.nii.gz", "x" * 5000))
    return bench.case
