"""Corrected copies: what is corrected, what stays byte for byte, and where nothing may be written."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from faults import FAULTS, SITE, Bench, load, save
from refusing import refused

from panorgan.data_doctor import examine, fix_headers

CORRECTED = (
    "shifted_origin",
    "label_with_another_spacing",
    "oblique_label",
    "label_header_flipped",
    "label_turned_by_a_hair",
    "spacing_in_metres",
    "spacing_in_micrometres",
    "qform_and_sform_disagree",
    "qform_that_is_no_rotation",
    "labels_of_0_999",
    "needless_axis",
    "nan_in_image",
)


def content(folder: Path) -> dict[str, str]:
    """Hash of every file by its place."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("name", CORRECTED)
def test_a_corrected_copy_is_clean_and_the_rest_is_untouched(name, make_bench, clean_folder, tmp_path):
    bench: Bench = make_bench(seed=3)
    FAULTS[name].damage(bench)
    before = content(bench.folder)
    out = tmp_path / "out"
    fixed = fix_headers(examine([bench.source], workers=1), out)
    assert content(bench.folder) == before, "the original was changed"
    assert {file.copy.relative_to(out) for file in fixed} == {file.path.relative_to(bench.folder) for file in fixed}
    changed = {str(file.copy.relative_to(out)) for file in fixed}
    after = content(out)
    assert after.keys() == before.keys()
    assert {place for place in after if after[place] != before[place]} == changed != set()
    assert examine([replace(bench.source, folder=out)], workers=1).findings == ()
    assert all(file.reason for file in fixed)
    if name != "nan_in_image":  # there the lost values cannot come back
        for path in (bench.image, bench.label):
            place = path.relative_to(bench.folder)
            voxels, affine = load(out / place)
            true_voxels, true_affine = load(clean_folder / place)
            np.testing.assert_array_equal(voxels, true_voxels)
            np.testing.assert_allclose(affine, true_affine, atol=1e-3)


def test_what_would_be_a_guess_is_left_alone(make_bench, tmp_path):
    """The header of this label is right: it was drawn on a shifted grid, and its voxels do not fit the image's."""
    bench: Bench = make_bench()
    labels, affine = load(bench.label)
    moved = affine.copy()
    moved[:3, 3] -= affine[:3, :3] @ [0, 6, 0]
    save(bench.label, np.roll(labels, 6, axis=1), moved)
    checkup = examine([bench.source], workers=1)
    (found,) = (finding for finding in checkup.findings if finding.code == "origin-mismatch")
    assert "Resample" in found.fix
    assert fix_headers(checkup, tmp_path / "out") == []


def test_the_scaling_of_a_file_is_kept(make_bench, tmp_path):
    """Stored integers with slope and intercept stay the same integers with the same slope and intercept."""
    bench: Bench = make_bench()
    hu, affine = load(bench.image)
    stored = (hu + 1024).astype(np.int16)
    image = nib.Nifti1Image(stored, affine)
    image.header.set_slope_inter(1.0, -1024.0)
    image.set_sform(affine, code=1)
    shifted = affine.copy()
    shifted[:3, 3] += 30
    image.set_qform(shifted, code=1)
    nib.save(image, bench.image)
    (fixed,) = fix_headers(examine([bench.source], workers=1), tmp_path / "out")
    copy = nib.load(fixed.copy)
    assert (copy.dataobj.slope, copy.dataobj.inter) == (1.0, -1024.0)
    np.testing.assert_array_equal(copy.dataobj.get_unscaled(), stored)
    np.testing.assert_allclose(copy.get_qform(), affine, atol=1e-4)


def test_mask_files_and_several_sources(make_bench, tmp_path):
    """One folder per site; only the damaged mask of a case is rewritten."""
    benches = [make_bench(name=name) for name in ("one", "two")]
    masks = benches[0].as_mask_files() / benches[0].case / "segmentations"
    benches[0].turn(masks / "liver.nii.gz", lambda a: a + np.eye(4, k=3) * 20)
    sources = [replace(bench.source, site=site) for bench, site in zip(benches, ("a", "b"), strict=True)]
    heard = []
    fixed = fix_headers(examine(sources, workers=1), tmp_path / "out", lambda *progress: heard.append(progress))
    assert [file.copy for file in fixed] == [
        tmp_path / "out" / "a" / benches[0].case / "segmentations" / "liver.nii.gz"
    ]
    assert content(tmp_path / "out" / "b") == content(benches[1].folder)
    assert heard[-1][0] == heard[-1][1] == len(content(tmp_path / "out"))


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("data", "output-overlaps-data"),
        ("data/inside", "output-overlaps-data"),
        (".", "output-overlaps-data"),
        ("taken", "output-not-empty"),
    ],
)
def test_places_that_are_refused(place, code, make_bench, tmp_path):
    bench: Bench = make_bench()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    checkup = examine([bench.source], workers=1)
    before = content(tmp_path)
    with refused(code):
        fix_headers(checkup, tmp_path / place)
    assert content(tmp_path) == before


def test_a_table_of_files_elsewhere_is_refused(make_bench, tmp_path):
    bench: Bench = make_bench()
    FAULTS["shifted_origin"].damage(bench)
    bench.as_table()
    with refused("table-leaves-folder"):
        fix_headers(examine([bench.source], workers=1), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_table_beside_its_files(make_bench, tmp_path):
    bench: Bench = make_bench()
    rows = [f"{c},imagesTr/{c}_0000.nii.gz,labelsTr/{c}.nii.gz,liver=1" for c in bench.cases]
    table = bench.folder / "mine.csv"
    table.write_text("\n".join(["case,image,label,annotated", *rows]))
    ids = ";".join(f"{name}={number}" for name, number in bench.ids.items() if number)
    table.write_text(table.read_text().replace("liver=1", ids))
    bench.turn(bench.label, lambda a: a + np.eye(4, k=3) * 20)
    source = replace(bench.source, folder=table)
    (fixed,) = fix_headers(examine([source], workers=1), tmp_path / "out")
    assert fixed.copy == tmp_path / "out" / "labelsTr" / f"{bench.case}.nii.gz"
    assert examine([replace(source, folder=tmp_path / "out" / "mine.csv")], workers=1).findings == ()
    assert not (tmp_path / "out" / "dataset.json").exists(), "only what the table names"


@pytest.mark.parametrize("linked", ["imagesTr", "labelsTr"])
def test_linked_folders_are_copied(linked, make_bench, tmp_path):
    """The scans lie on another disk. A link back to the folder itself must not be followed for ever."""
    bench: Bench = make_bench()
    FAULTS["shifted_origin"].damage(bench)
    before = content(bench.folder)
    (bench.folder / linked).rename(tmp_path / "elsewhere")
    (bench.folder / linked).symlink_to(tmp_path / "elsewhere")
    (bench.folder / "again").symlink_to(bench.folder)
    (bench.folder / ".hidden").write_text("kept")
    assert len(fix_headers(examine([bench.source], workers=1), tmp_path / "out")) == 1
    after = content(tmp_path / "out")
    assert after.keys() == {*before, ".hidden"}
    assert {place for place in before if after[place] != before[place]} == {f"labelsTr/{bench.case}.nii.gz"}
    assert examine([replace(bench.source, folder=tmp_path / "out")], workers=1).findings == ()


def test_a_file_outside_of_the_folder_is_not_forgotten(make_bench, tmp_path):
    """The decathlon's list may point anywhere."""
    bench: Bench = make_bench()
    FAULTS["shifted_origin"].damage(bench)
    pairs = [{"image": f"./imagesTr/{case}_0000.nii.gz", "label": f"./labelsTr/{case}.nii.gz"} for case in bench.cases]
    bench.image_of(bench.other).rename(tmp_path / f"{bench.other}_0000.nii.gz")
    pairs[bench.cases.index(bench.other)]["image"] = f"../{bench.other}_0000.nii.gz"
    labels = {str(number): name for name, number in bench.ids.items()}
    bench.describe(labels=labels, training=pairs, modality={"0": "CT"})
    checkup = examine([bench.source], workers=1)
    assert checkup.layouts == {SITE: "msd"}
    with refused("file-outside-folder"):
        fix_headers(checkup, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_to_correct_writes_nothing(make_bench, tmp_path):
    bench: Bench = make_bench()
    assert fix_headers(examine([bench.source], workers=1), tmp_path / "out") == []
    FAULTS["stray_id"].damage(bench)
    assert fix_headers(examine([bench.source], workers=1), tmp_path / "out") == []
    assert not (tmp_path / "out").exists()


def test_a_source_that_cannot_be_opened_is_refused(make_bench, tmp_path):
    good, bad = make_bench(name="good"), make_bench(name="bad")
    FAULTS["shifted_origin"].damage(good)
    (bad.folder / "dataset.json").write_text("{")
    checkup = examine([good.source, replace(bad.source, site="bad")], workers=1)
    with refused("folder-not-opened"):
        fix_headers(checkup, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_names_the_layout_that_was_chosen(make_bench):
    bench: Bench = make_bench()
    FAULTS["shifted_origin"].damage(bench)
    (bench.folder / "cases.csv").write_text("case,image,label,annotated\n")
    checkup = examine([replace(bench.source, layout="nnunet")], workers=1)
    (found,) = checkup.findings
    assert found.fix.endswith(f"panorgan doctor {bench.folder} --layout nnunet --fix-headers OUT")
