"""The viewer in a real browser that draws: slices, organs, volumes, the worst case from the report, methods, twins."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from devtools import Page
from viewed_files import AFFINE, SHAPE, VOXEL_ML, save
from webgl import chromium_with_webgl, coloured, shown

import panorgan
from panorgan.report.doctor_page import write_doctor_page
from panorgan.viewer.open_study import open_study
from panorgan.viewer.session import Session

pytestmark = pytest.mark.slow
READY = "document.body.dataset.state === 'ready' && document.body.dataset.volumes === 'ready'"


@contextmanager
def viewer(path: Path, folder: Path, case: str = "", organ: str = "", width: int = 1280) -> Iterator[Page]:
    """A page of the viewer with its first case loaded; in the end, nothing may have been complained about."""
    with Session(open_study(path), case, organ) as session, chromium_with_webgl(folder) as browser:
        page = browser.open(session.url, width)
        page.wait_for("document.body.dataset.state === 'failed' || (" + READY + ")")
        assert page.value("document.body.dataset.state") == "ready", page.text("#where")
        yield page
        assert [text for text in browser.complaints if "GPU stall" not in text] == []


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.press("body", key)


def millilitres(page: Page, organ: str, column: int = 0) -> float:
    return float(page.value(f"document.querySelectorAll('[data-organ={organ}] [data-ml]')[{column}].dataset.ml"))


def test_slices_organs_windows_and_volumes(nnunet_folder, labels, tmp_path):
    with viewer(nnunet_folder, tmp_path, organ="spleen") as page:
        assert page.text("#case-name") == "a1"
        assert "Spleen" in page.text("#where"), "the slice with most of the organ that was asked for"
        # volumes as numpy counts them
        for organ, mask in {
            "liver": np.isin(labels, (1, 2)),
            "liver_tumour": labels == 2,
            "spleen": labels == 3,
        }.items():
            assert millilitres(page, organ) == pytest.approx(mask.sum() * VOXEL_ML), organ
        # a slice on, and back
        before, place = shown(page, tmp_path), page.value("document.body.dataset.slice")
        press(page, "ArrowUp")
        page.wait_for(f"document.body.dataset.slice !== '{place}'")
        after = shown(page, tmp_path)
        assert (np.abs(after - before).max(axis=2) > 12).sum() > 500
        press(page, "ArrowDown")
        page.wait_for(f"document.body.dataset.slice === '{place}'")
        # the wheel does the same
        box = page.value(
            "(r => [r.x + r.width / 2, r.y + r.height / 2])(document.querySelector('canvas').getBoundingClientRect())"
        )
        page.send("Input.dispatchMouseEvent", type="mouseWheel", x=box[0], y=box[1], deltaX=0, deltaY=120)
        page.wait_for(f"document.body.dataset.slice !== '{place}'")
        press(page, "ArrowUp", "ArrowDown", "0", "0")
        # organs off and on
        on = coloured(shown(page, tmp_path))
        assert on > 500
        press(page, "0")
        assert page.value("[...document.querySelectorAll('#organ-list input')].some(box => box.checked)") is False
        assert coloured(shown(page, tmp_path)) == 0
        press(page, "0")
        assert coloured(shown(page, tmp_path)) == on
        page.value("document.querySelector('[data-organ=liver] input').click()")
        assert 0 < coloured(shown(page, tmp_path)) < on
        # windows, planes and help
        grey = shown(page, tmp_path)
        page.choose("#window", "Lung")
        assert (np.abs(shown(page, tmp_path) - grey).max(axis=2) > 12).sum() > 500
        for key in ("c", "s", "r", "m", "a"):
            press(page, key)
            assert shown(page, tmp_path).max() > 100, key
            assert page.value("document.querySelectorAll('#views [aria-pressed=true]').length") == 1
        press(page, "?")
        assert page.value("document.querySelector('#help').open")
        page.value("document.querySelector('#help').close()")
        # the next case has no labels
        press(page, "ArrowRight")
        page.wait_for(
            "document.querySelector('#case-name').innerText === 'b2' && document.body.dataset.state === 'ready'"
        )
        assert page.value("document.querySelector('#organs').hidden")
        assert shown(page, tmp_path).max() > 100


@pytest.mark.parametrize("stored", [(0, 1, 2), (2, 0, 1)], ids=["axial", "sagittal"])
def test_it_opens_on_the_slice_with_most_foreground(nnunet_folder, hu, tmp_path, stored):
    labels = np.zeros(SHAPE, np.uint8)
    labels[4, 4, 9] = 1  # the first organ of the list, in a slice that shows little
    labels[10:15, 5:9, 2] = 3
    labels[3:5, 3:5, 2] = 2
    affine = AFFINE[:, [*stored, 3]]
    save(nnunet_folder / "imagesTr" / "a1_0000.nii.gz", hu.transpose(stored), affine)
    save(nnunet_folder / "labelsTr" / "a1.nii.gz", labels.transpose(stored), affine)
    with viewer(nnunet_folder, tmp_path) as page:
        middle = AFFINE @ [12, 6.5, 2, 1]
        assert page.text("#where").startswith(" ".join(f"{mm:.0f}" for mm in middle[:3]))
        assert "Spleen" in page.text("#where")


def test_the_worst_case_opens_first_and_from_the_report(finished_run, tmp_path):
    scores: dict[tuple[str, str], list[float]] = {}
    for row in finished_run.scores:
        if np.isfinite(row["dice"]):
            scores.setdefault((row["site"], row["case"]), []).append(row["dice"])
    worst = min(scores, key=lambda key: np.mean(scores[key]))
    # The report names a case by a command in this form.
    command = '<span class="view-link"><code>panorgan view x --case <span data-view="case">{}</span> --organ '
    command += '<span data-view="organ">liver</span></code><button class="copy" hidden>Copy</button></span>'
    copy = tmp_path / "copy"
    shutil.copytree(finished_run.path, copy)
    other = next(key for key in scores if key != worst)
    page_file = copy / "report.html"
    page_file.write_text(page_file.read_text().replace("</main>", command.format(other[1]) + "</main>"))
    with viewer(copy, tmp_path) as page:
        listed = [float(text) for text in page.value("[...document.querySelectorAll('.dice')].map(e => e.textContent)")]
        assert listed == sorted(listed)
        assert len(listed) == len(scores)
        assert page.text("#case-name") == page.text("#case-list .name")
        assert listed[0] == pytest.approx(np.mean(scores[worst]), abs=0.0005)
        # reference beside the prediction, or over it
        assert page.value("[...document.querySelectorAll('figcaption strong')].map(e => e.innerText)") == [
            "Prediction",
            "Reference",
        ]
        beside = page.value("document.querySelector('canvas').getBoundingClientRect().width")
        press(page, "o")
        page.wait_for("document.querySelectorAll('figure')[1].hidden")
        page.wait_for(f"document.querySelector('canvas').getBoundingClientRect().width > {beside + 50}")
        assert coloured(shown(page, tmp_path)) > 50
        # from the report
        page.value("document.querySelector('#page').click()")
        page.wait_for("document.querySelectorAll('a.open-here').length > 0")
        page.value("[...document.querySelectorAll('a.open-here')].at(-1).click()")
        page.wait_for("document.body.dataset.state === 'ready'")
        assert page.text("#case-name") == other[1]
        assert page.value("document.querySelector('#sort').value") == "liver"


def test_volumes_of_a_run_are_those_of_prediction_and_reference(finished_run, tmp_path):
    case = finished_run.scores[0]
    with viewer(finished_run.path, tmp_path, case=f"{case['site']}/{case['case']}") as page:
        image = nib.load(finished_run.predictions_folder / case["site"] / f"{case['case']}.nii.gz")
        number = list(finished_run.vocabulary).index("liver") + 1
        ml = (np.asarray(image.dataobj) == number).sum() * abs(np.linalg.det(image.affine[:3, :3])) / 1000
        assert millilitres(page, "liver") == pytest.approx(ml)


def test_methods_stand_side_by_side_and_move_together(finished_run, tmp_path):
    for method in ("fedavg", "solo"):
        shutil.copytree(finished_run.path, tmp_path / "cmp" / method / "seed-0")
    (tmp_path / "cmp" / "comparison.html").write_text("<html><body>comparison</body></html>")
    with viewer(tmp_path / "cmp", tmp_path) as page:
        assert page.value("document.querySelectorAll('figure').length") == 3
        pictures = [shown(page, tmp_path, pane) for pane in range(3)]
        assert all(picture.max() > 100 for picture in pictures)
        press(page, "ArrowUp", "ArrowUp")
        for pane, before in enumerate(pictures):
            assert (np.abs(shown(page, tmp_path, pane) - before).max(axis=2) > 12).sum() > 100, pane


def test_a_finding_opens_with_its_twin_beside_it(nnunet_folder, labels, tmp_path):
    save(nnunet_folder / "labelsTr" / "b2.nii.gz", labels)
    doctors = write_doctor_page(panorgan.doctor(nnunet_folder, workers=1), nnunet_folder / "doctor.html")
    with viewer(doctors, tmp_path, case="b2") as page:
        assert page.value("[...document.querySelectorAll('figcaption strong')].map(e => e.innerText)") == ["b2", "a1"]
        remarks = page.value("[...document.querySelectorAll('#remarks button code')].map(e => e.innerText)")
        assert "duplicate-scan" in remarks
        assert coloured(shown(page, tmp_path, 0)) > 100
        assert coloured(shown(page, tmp_path, 1)) > 100


def test_a_case_of_two_sites_opens_at_its_own(nnunet_folder, hu, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(nnunet_folder, other)
    save(other / "imagesTr" / "a1_0000.nii.gz", np.flip(hu, 0).copy())
    sites = {"north": {"folder": str(nnunet_folder)}, "south": {"folder": str(other)}}
    experiment = panorgan.load_experiment({"name": "two", "vocabulary": ["liver", "spleen"], "sites": sites})
    doctors = write_doctor_page(panorgan.doctor(experiment, workers=1), tmp_path / "doctor.html")
    with viewer(doctors, tmp_path, case="north/b2") as page:
        for site in ("south", "north"):
            page.follow("document.querySelector('#page')")
            page.wait_for("!document.body.dataset.state && document.querySelector('#case-list tbody tr')")
            named = f"row.cells[0].innerText === 'a1' && row.cells[1].innerText === '{site}'"
            page.value(f"[...document.querySelectorAll('#case-list tbody tr')].find(row => {named}).cells[0].click()")
            page.wait_for("document.querySelector('.picked a.open-here')")
            page.follow("document.querySelector('.picked a.open-here')")
            page.wait_for("document.body.dataset.state === 'ready'")
            assert (page.text("#case-name"), page.text("#case-facts")) == ("a1", site)


def test_a_large_scan_comes_coarse_first(nnunet_folder, tmp_path, monkeypatch):
    large = np.zeros((180, 180, 140), np.int16) - 1000
    large[40:140, 40:140] = 50
    save(nnunet_folder / "imagesTr" / "a1_0000.nii.gz", large)
    monkeypatch.setattr("panorgan.viewer.session.FIRST", 100_000)
    asked: list[str] = []
    original = Session._scan

    def noted(self, pane, key, request):
        asked.append(request.query.get("most", "all"))
        return original(self, pane, key, request)

    monkeypatch.setattr(Session, "_scan", noted)
    with viewer(nnunet_folder, tmp_path) as page:
        assert asked[0] == "100000"
        assert shown(page, tmp_path).max() > 100
        if not page.value("document.querySelector('#full').hidden"):  # a slow machine waits to be asked
            press(page, "f")
            page.wait_for("document.body.dataset.state === 'ready' && document.querySelector('#full').hidden")
        assert asked[-1] == "all"


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_reaches_beyond_a_narrow_window(nnunet_folder, tmp_path, width):
    with viewer(nnunet_folder, tmp_path, width=width) as page:
        assert page.value("document.documentElement.scrollWidth") <= width
        assert page.value("document.querySelector('canvas').getBoundingClientRect().width") > 0.4 * min(width, 900)


def test_names_are_shown_as_they_are(tmp_path, hu):
    name = "it's \"x\"><img src=x onerror=document.title='hit'>"
    save(tmp_path / "scans" / f"{name}.nii.gz", hu)
    with viewer(tmp_path / "scans", tmp_path) as page:
        assert page.text("#case-name") == " ".join(name.split())
        assert page.value("document.title").endswith("panorgan view")
        assert json.loads(page.value("JSON.stringify(document.querySelectorAll('img').length)")) == 0
