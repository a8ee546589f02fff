"""The whole check-up: processes, order, progress, several sites, and what it imports."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faults import FAULTS, SITE, Bench, load

from panorgan.anatomy import Vocabulary
from panorgan.data_doctor import Checkup, Finding, Severity, Source, examine, memory, read_case
from panorgan.data_doctor.folders import open_source


def test_processes_and_one_process_say_the_same(make_bench):
    bench: Bench = make_bench(seed=1)
    for name in ("flipped_left_right", "stray_id"):
        FAULTS[name].damage(bench)
    heard: list[tuple[int, int]] = []
    alone = examine([bench.source], workers=1)
    together = examine([bench.source], workers=2, on_progress=lambda *step: heard.append(step))
    assert alone.findings == together.findings != ()
    assert heard == [(1, 4), (2, 4), (3, 4), (4, 4)]
    for one, other in zip(alone.cases, together.cases, strict=True):
        np.testing.assert_array_equal(one.thumbnail.grey, other.thumbnail.grey)
        assert replace(one, thumbnail=None) == replace(other, thumbnail=None)


def test_the_worst_comes_first(make_bench):
    first, second = make_bench(seed=1, name="one"), make_bench(seed=2, name="two")
    FAULTS["labels_of_0_999"].damage(first)
    FAULTS["needless_axis"].damage(first)
    FAULTS["stray_id"].damage(second)
    # Another site has the same scans: that is reported too, as a warning.
    checkup = examine([first.source, replace(second.source, site="second")], workers=1)
    severities = [finding.severity for finding in checkup.findings]
    assert severities == sorted(severities, reverse=True)
    assert checkup.worst == Severity.error
    assert {f.code for f in checkup.findings if f.severity == Severity.note} == {"singleton-axis"}


def test_the_same_scans_at_two_sites(make_bench):
    """Trained on at both: look at it. Trained on here and tested on there: a leak."""
    first, second = make_bench(name="one"), make_bench(name="two")
    train = dict.fromkeys(first.cases, "train")
    sources = [replace(first.source, splits=train), replace(second.source, site="second", splits=train)]
    codes = {finding.code for finding in examine(sources, workers=1).findings}
    assert codes == {"duplicate-scan"}
    sources[1] = replace(sources[1], splits=dict.fromkeys(first.cases, "test"), external=True)
    codes = {finding.code for finding in examine(sources, workers=1).findings}
    assert codes == {"duplicate-across-splits"}


def test_parts_of_one_folder_share_nothing(make_bench):
    bench: Bench = make_bench(cases=9)
    halves = [replace(bench.source, site=f"part{i}", patients=frozenset(bench.cases[i::2])) for i in range(2)]
    checkup = examine(halves, workers=1)
    assert checkup.findings == ()
    assert [facts.site for facts in checkup.cases] == ["part0"] * 5 + ["part1"] * 4


def test_names_are_read_as_the_experiment_says(make_bench):
    bench: Bench = make_bench()
    labels = bench.ids
    labels["Leberchen"], labels["junk"] = labels.pop("liver"), labels.pop("lung")
    bench.describe(labels=labels)
    source = replace(bench.source, rename={"Leberchen": "liver"}, ignore=("junk",))
    checkup = examine([source], workers=1)
    assert checkup.findings == ()
    names = {structure.name for structure in checkup.cases[0].structures}
    assert "liver" in names
    assert "lung" not in names
    only = examine([replace(source, vocabulary=Vocabulary(["liver", "kidney"]))], workers=1)
    assert {structure.name for structure in only.cases[0].structures} == {"liver", "kidney_left", "kidney_right"}


def test_unknown_names_come_with_the_line_that_helps(make_bench):
    bench: Bench = make_bench()
    labels = bench.ids
    labels["livver"], labels["junk"] = labels.pop("liver"), labels.pop("lung")
    bench.describe(labels=labels)
    (found,) = examine([bench.source], workers=1).findings
    assert "ignore: [junk, livver]" in found.fix
    assert "labels: {junk: <organ>}" in found.fix
    assert "Did you mean 'liver'" in found.fix


def test_an_external_site_without_labels_is_in_order(make_bench):
    bench: Bench = make_bench()
    for case in bench.cases:
        bench.label_of(case).unlink()
    bench.describe(labels={"background": 0})
    vocabulary = Vocabulary(["liver"])
    assert examine([replace(bench.source, vocabulary=vocabulary, external=True)], workers=1).findings == ()
    (found,) = examine([replace(bench.source, vocabulary=vocabulary)], workers=1).findings
    assert found.code == "nothing-annotated"


def test_facts_of_a_structure(make_bench):
    """Counted by hand from the label file."""
    bench: Bench = make_bench()
    labels, affine = load(bench.label)
    hu, _ = load(bench.image)
    checkup = examine([bench.source], workers=1)
    facts = next(f for f in checkup.cases if f.case == bench.case)
    liver = next(s for s in facts.structures if s.name == "liver")
    mask = labels == bench.ids["liver"]
    places = np.argwhere(mask)
    assert liver.voxels == mask.sum()
    assert liver.volume_ml == pytest.approx(mask.sum() * 0.512)  # 8 mm cubes
    assert liver.centre_mm == pytest.approx(tuple(affine[:3, :3] @ places.mean(axis=0) + affine[:3, 3]))
    assert liver.median == np.median(hu[mask])
    assert (facts.shape, facts.orientation, facts.modality) == (hu.shape, "LPS", "CT")
    assert facts.spacing_mm == pytest.approx((8, 8, 8))
    assert facts.label_files == (bench.label,)


def test_workers_start_without_torch():
    """A worker imports the doctor anew; torch would cost it seconds."""
    heavy = "('torch', 'monai', 'SimpleITK')"
    look = f"import sys, panorgan.data_doctor.read_case; print([m for m in {heavy} if m in sys.modules])"
    reported = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert reported.stdout.strip() == "[]"


def test_a_source_that_cannot_be_opened_does_not_stop_the_others(make_bench):
    bench: Bench = make_bench()
    checkup = examine([Source("gone", bench.folder / "nowhere"), bench.source], workers=1)
    assert [(f.code, f.site) for f in checkup.findings] == [("folder-missing", "gone")]
    assert checkup.layouts == {SITE: "nnunet"}
    assert len(checkup.cases) == 4


@pytest.mark.parametrize("content", [b"case,image,label\xff\xfe,annotated\n", b"case,image,label,annotated\na\n"])
def test_a_broken_table_is_a_finding(content, tmp_path):
    (tmp_path / "cases.csv").write_bytes(content)
    codes = [finding.code for finding in examine([Source("here", tmp_path)], workers=1).findings]
    assert len(codes) == 1
    assert codes[0] in ("folder-unreadable", "file-unreadable", "no-layout")


@pytest.mark.parametrize("layout", ["auto", "nnunet", "kits"])
def test_a_missing_folder_is_told_as_such(layout, tmp_path):
    (found,) = examine([Source("here", tmp_path / "gone", layout)], workers=1).findings
    assert found.code == "folder-missing"


def only(checkup: Checkup, code: str) -> Finding:
    (found,) = (finding for finding in checkup.findings if finding.code == code)
    return found


def test_one_broken_case_does_not_stop_the_others(make_bench, monkeypatch):
    bench: Bench = make_bench()
    draw = read_case.thumbnail.draw
    calls = []

    def fail_once(*about):
        calls.append(about)
        if len(calls) == 2:
            raise MemoryError("no room")
        return draw(*about)

    monkeypatch.setattr(read_case.thumbnail, "draw", fail_once)
    checkup = examine([bench.source], workers=1)
    found = only(checkup, "file-unreadable")
    assert (found.case, found.why) == (bench.cases[1], "MemoryError: no room")
    assert len(checkup.cases) == len(calls) == 4


def test_what_all_masks_share_is_told_once(make_bench):
    bench: Bench = make_bench()
    FAULTS["empty_label"].damage(bench)
    assert only(examine([bench.source], workers=1), "empty-mask").what == "All 8 masks are empty."
    bench = make_bench(name="large")
    for path in (bench.image, bench.label):
        bench.turn(path, lambda affine: np.diag([9.0, 9.0, 9.0, 1.0]) @ affine)
    found = only(examine([bench.source], workers=1), "huge-mask")
    assert found.what == "8 of 8 masks: huge mask."
    assert "liver" in found.why


def test_an_image_saved_as_label_names_a_few_ids(make_bench):
    bench: Bench = make_bench()
    FAULTS["image_saved_as_label"].damage(bench)
    found = only(examine([bench.source], workers=1), "stray-label")
    assert found.what.startswith("A label file holds undeclared ids: 9, 10, 11, 12, 13, 14, 15, 16 and ")


def test_the_line_for_a_structure_that_is_never_drawn_works(make_bench):
    """`ignore` knows the folder's own names."""
    bench: Bench = make_bench()
    bench.describe(labels=bench.ids | {"Bauchaorta": 20})
    source = replace(bench.source, rename={"Bauchaorta": "aorta"})
    found = only(examine([source], workers=1), "never-annotated")
    assert "'ignore: [Bauchaorta]'" in found.fix
    assert examine([replace(source, ignore=("Bauchaorta",))], workers=1).findings == ()


def test_the_row_for_a_case_without_a_structure_works(make_bench, tmp_path):
    bench: Bench = make_bench()
    bench.describe(labels=bench.ids | {"kidney_right": [bench.ids["kidney_right"], 77]})
    bench.paint("spleen", lambda mask, hu: np.zeros_like(mask))
    found = only(examine([bench.source], workers=1), "empty-mask")
    row = found.fix.partition("cases.csv: ")[2]
    (tmp_path / "cases.csv").write_text(f"case,image,label,annotated\n{row}\n")
    checkup = examine([Source("one", tmp_path, external=True)], workers=1)
    assert checkup.findings == ()
    drawn = {structure.name for structure in checkup.cases[0].structures}
    assert drawn == {"liver", "kidney_left", "kidney_right", "pancreas", "gallbladder", "stomach", "lung"}


def test_mask_files_are_read_as_training_reads_them(make_bench):
    """Half and more is drawn."""
    bench: Bench = make_bench()
    FAULTS["interpolated_mask_file"].damage(bench)
    checkup = examine([bench.source], workers=1)
    values, _ = load(bench.source.folder / bench.case / "segmentations" / "liver.nii.gz")
    case = next(one for one in checkup.cases if one.case == bench.case)
    assert next(s.voxels for s in case.structures if s.name == "liver") == np.count_nonzero(values > 0.5)


@pytest.mark.parametrize(("as_what", "says"), [("nnunet", "channel_names in dataset.json"), ("csv", "modality column")])
def test_a_wrong_modality_is_corrected_where_it_is_written(as_what, says, make_bench):
    bench: Bench = make_bench()
    if as_what == "csv":
        bench.as_table(modality="CT")
    FAULTS["mr_declared_as_ct"].damage(bench)
    assert says in only(examine([bench.source], workers=1), "modality-mismatch").fix


def test_no_scans_in_the_words_of_the_layout(tmp_path):
    (tmp_path / "cases.csv").write_text("case,image,label,annotated\n")
    assert "Add a row" in only(examine([Source("here", tmp_path)], workers=1), "no-scans").fix


def test_a_label_without_orientation_is_not_converted_from_dicom(make_bench):
    bench: Bench = make_bench()
    FAULTS["no_orientation"].damage(bench)
    found = {Path(f.file): f.fix for f in examine([bench.source], workers=1).findings if f.code == "no-orientation"}
    assert "DICOM" in found[bench.image]
    assert "DICOM" not in found[bench.label]


def test_a_damaged_slice_does_not_hide_the_tree(make_bench):
    bench: Bench = make_bench()
    tree = bench.as_dicom()
    shutil.copytree(tree / "ct", tree / "second")
    from dicom_files import change

    for path in (tree / "second").iterdir():
        change(path, SeriesInstanceUID="1.2.3.4.5.6", PatientID="somebody", FrameOfReferenceUID="1.2.3.4.5.7")
    cut = sorted((tree / "second").iterdir())[0]
    cut.write_bytes(cut.read_bytes()[:600])
    checkup = examine([bench.source], workers=1)
    assert [facts.case for facts in checkup.cases] == ["ct"]
    assert only(checkup, "file-unreadable").file == str(cut)


def test_processes_by_free_memory(clean_folder):
    """A phantom of 48 × 36 × 35 voxels or so needs 40 bytes for each of them."""
    tasks = open_source(Source(SITE, clean_folder)).tasks
    most = max(int(np.prod(load(task.image)[0].shape)) for task in tasks)
    assert memory.largest_scan(tasks) == most
    assert memory.fitting_workers(tasks, cores=16, free_bytes=3.5 * 40 * most) == 3
    assert memory.fitting_workers(tasks, cores=2, free_bytes=1e12) == 2
    assert memory.fitting_workers(tasks, cores=16, free_bytes=1e12) == 8
    assert memory.fitting_workers(tasks, cores=16, free_bytes=0.0) == 1
