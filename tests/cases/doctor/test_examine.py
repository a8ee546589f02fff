"""The whole check-up: processes, order, progress, several sites, and what it imports."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from faults import FAULTS, SITE, Bench, load

from panorgan.anatomy import Vocabulary
from panorgan.cases.doctor import Severity, Source, examine


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
    # Another site has the same scans: that is told too, as a warning.
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
    look = f"import sys, panorgan.cases.doctor.facts; print([m for m in {heavy} if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


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
    assert codes[0] in ("folder-unreadable", "file-unreadable")


@pytest.mark.parametrize("layout", ["auto", "nnunet", "kits"])
def test_a_missing_folder_is_told_as_such(layout, tmp_path):
    (found,) = examine([Source("here", tmp_path / "gone", layout)], workers=1).findings
    assert found.code == "folder-missing"
