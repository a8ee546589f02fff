"""Every seeded fault is found where it was made, and nothing else is called an error; clean folders are silent."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import FAULTS, SITE, Fault, write_clean_folder

from panorgan.data_doctor import CODES, Checkup, Severity, Source, examine
from panorgan.phantom import DEFAULT_SITES, PhantomConfig, write_federation


@pytest.mark.parametrize(("seed", "fault"), enumerate(FAULTS.values()), ids=list(FAULTS))
def test_a_fault_is_found_at_its_case_and_nothing_else_is_an_error(seed: int, fault: Fault, make_bench):
    """Which case is damaged, and how badly, is drawn: for every fault otherwise."""
    bench = make_bench(seed, fault.cases)
    where = fault.damage(bench)
    cases = (where,) if isinstance(where, str) else where
    checkup = examine([bench.source], workers=1)
    for code in fault.codes:
        found = [finding for finding in checkup.findings if finding.code == code]
        assert any(finding.case in cases for finding in found), tell(checkup)
        assert all(finding.what and finding.fix for finding in found)
    errors = {f.code for f in checkup.findings if f.severity == Severity.error}
    assert errors <= set(fault.codes), tell(checkup)
    assert {f.case for f in checkup.findings} <= {*cases, ""}, tell(checkup)


def tell(checkup: Checkup) -> str:
    return "\n".join(f"{f.severity.name} {f.code} {f.case} {f.structure}: {f.what} {f.why}" for f in checkup.findings)


def test_every_code_is_documented_and_produced_by_some_fault():
    produced = {code for fault in FAULTS.values() for code in fault.codes}
    # An experiment file that training refuses is no fault of a folder; tests/workflows/test_sources.py has it.
    assert produced == set(CODES) - {"experiment-refused"}
    assert len(FAULTS) >= 30
    for code, (severity, title, meaning) in CODES.items():
        assert code == code.lower()
        assert isinstance(severity, Severity)
        assert title
        assert meaning.endswith((".", "?"))


def test_the_clean_folder_is_silent(clean_folder):
    checkup = examine([Source(SITE, clean_folder)], workers=1)
    assert tell(checkup) == ""
    assert checkup.worst is None
    assert len(checkup.cases) == 9
    assert checkup.layouts == {SITE: "nnunet"}


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_other_phantoms_are_silent(seed, tmp_path):
    checkup = examine([Source(SITE, write_clean_folder(tmp_path / "phantoms", cases=4, seed=seed))], workers=1)
    assert tell(checkup) == ""


def test_what_systems_leave_in_folders_is_no_case(make_bench):
    """A Mac, a Windows machine, a note, an editor that writes a byte order mark, and scans on another disk."""
    bench = make_bench()
    (bench.folder / "imagesTs").mkdir()
    for place in ("imagesTr", "labelsTr", "imagesTs"):
        for name in (f"._{bench.case}_0000.nii.gz", f"._{bench.case}.nii.gz", ".DS_Store", "Thumbs.db", "notes.txt"):
            (bench.folder / place / name).write_bytes(b"\0\5\26\7")
    description = bench.folder / "dataset.json"
    description.write_text(description.read_text(), encoding="utf-8-sig")
    (bench.folder / "imagesTr").rename(bench.folder.parent / "elsewhere")
    (bench.folder / "imagesTr").symlink_to(bench.folder.parent / "elsewhere")
    checkup = examine([bench.source], workers=1)
    assert tell(checkup) == ""
    assert [facts.case for facts in checkup.cases] == bench.cases


@pytest.mark.parametrize("layout", ["csv", "totalsegmentator"])
def test_the_clean_folder_is_silent_in_other_layouts(layout, make_bench):
    bench = make_bench()
    bench.as_table() if layout == "csv" else bench.as_mask_files()
    checkup = examine([bench.source], workers=1)
    assert tell(checkup) == ""
    assert checkup.layouts == {SITE: layout}
    assert {facts.modality for facts in checkup.cases} == {"CT"}


def silent(folder: Path, cases: int, coarser: float, tumours: bool = False) -> None:
    """The demo's sites must give nothing, not even notes. Fewer than four cases are few, unless for testing only."""
    sites = tuple(
        site.model_copy(update={"cases": cases, "spacing_mm": tuple(coarser * mm for mm in site.spacing_mm)})
        for site in DEFAULT_SITES
    )
    folders = write_federation(PhantomConfig(sites=sites, tumours=tumours), folder)
    external = {site.name for site in sites if site.external or cases < 4}
    sources = [Source(name, path, external=name in external) for name, path in folders.items()]
    checkup = examine(sources, workers=1)
    assert tell(checkup) == ""
    assert len(checkup.cases) == 4 * cases


def test_the_demo_at_reduced_size_is_silent(tmp_path):
    silent(tmp_path / "phantoms", cases=4, coarser=2.2)


@pytest.mark.slow
def test_the_demo_at_full_size_is_silent(tmp_path):
    silent(tmp_path / "phantoms", cases=2, coarser=1.0, tumours=True)
