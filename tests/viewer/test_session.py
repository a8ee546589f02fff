"""What the viewer's addresses answer: numbers only, no paths, and pages that keep their policy."""

from __future__ import annotations

import html
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from refusing import refused
from viewed_files import save

from panorgan.viewer import session as session_module
from panorgan.viewer.open_study import open_study
from panorgan.viewer.session import STATIC, Session, with_links, worst
from panorgan.viewer.study import Pane, Scan, ViewedCase
from panorgan.viewer.volumes import Volumes

NASTY = "a'\"><img src=x onerror=alert(1)>&"


@pytest.fixture
def session(nnunet_folder: Path) -> Iterator[Session]:
    with Session(open_study(nnunet_folder)) as running:
        yield running


def get(session: Session, path: str) -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(session.server.url + path, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_the_page_loads_its_own_files_only(session):
    status, headers, body = get(session, "")
    assert status == 200
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert b"http" not in body.replace(b"http-equiv", b"")
    for name in STATIC:
        status, headers, body = get(session, f"static/{name}")
        assert (status, headers["Content-Type"]) == (200, STATIC[name])
        assert len(body) > 100


@pytest.mark.parametrize(
    "path",
    [
        "static/", "static/index.html", "static/../session.py", "static/..%2fsession.py", "static/%2e%2e/session.py",
        "static//etc/passwd", "scan", "scan/0", "scan/0/9", "scan/9/0", "scan/-1/0", "scan/0/0/0", "scan/0/..%2f..",
        "scan/a1/0", "scan/%D9%A1/0", "scan/99999999999999/0", "case/9", "case/", "labels/1/0", "volumes/1/0", "page",
        "etc/passwd",
    ],
)  # fmt: skip
def test_addresses_hold_numbers_and_lead_nowhere_else(session, path):
    assert get(session, path)[0] == 404


def test_a_scan_and_its_labels_come_as_nifti(session, hu, labels):
    _, _, body = get(session, "scan/0/0")
    assert np.array_equal(np.asarray(nib.Nifti1Image.from_bytes(body).dataobj), hu)
    _, _, body = get(session, "scan/0/0?most=500")
    coarse = nib.Nifti1Image.from_bytes(body)
    assert np.prod(coarse.shape) <= 500
    _, _, body = get(session, "labels/0/0?most=500")
    assert nib.Nifti1Image.from_bytes(body).shape == coarse.shape, "scan and labels stay on one grid"
    _, _, body = get(session, "case/0")
    (pane,) = json.loads(body)["panes"]
    assert pane["voxels"] == hu.size
    drawn = np.asarray(nib.Nifti1Image.from_bytes(get(session, "labels/0/0")[2]).dataobj)
    for number, name in enumerate(pane["labels"], start=1):
        stored = {"liver": 1, "liver_tumour": 2, "spleen": 3}[name]
        assert np.array_equal(drawn == number, labels == stored)
    assert set(json.loads(get(session, "volumes/0/0")[2])) == set(pane["labels"])


def test_odd_sizes_mean_everything(session, hu):
    for most in ("", "x", "-5", "1e3", "9" * 30):
        assert len(get(session, f"scan/0/0?most={most}")[2]) == 352 + hu.nbytes
    assert len(get(session, "scan/0/0?most=0")[2]) > 352, "a single voxel at least"


def test_a_scan_that_cannot_be_read_says_why(nnunet_folder):
    (nnunet_folder / "imagesTr" / "b2_0000.nii.gz").write_bytes(b"no scan")
    with Session(open_study(nnunet_folder)) as running:
        (pane,) = json.loads(get(running, "case/1")[2])["panes"]
        assert "cannot be read" in pane["problem"]
        assert get(running, "scan/1/0")[0] == 422
        assert "problem" not in json.loads(get(running, "case/0")[2])["panes"][0]


def test_names_are_data_and_never_markup(tmp_path, hu):
    save(tmp_path / f"{NASTY}.nii.gz", hu)
    with Session(open_study(tmp_path)) as running:
        assert NASTY not in get(running, "")[2].decode()
        _, headers, body = get(running, "study")
        assert json.loads(body)["cases"][0]["name"] == NASTY
        assert headers["Content-Type"] == "application/json"
        assert str(tmp_path) not in body.decode()
        assert str(tmp_path) not in get(running, "case/0")[2].decode()


def test_a_coarse_copy_is_read_once_and_whole_scans_are_never_kept(nnunet_folder, monkeypatch):
    opened, scan = Volumes(), open_study(nnunet_folder).cases[1].panes[0].scan
    first = b"".join(opened.scan_pieces(scan, 100))
    monkeypatch.setattr("panorgan.viewer.volumes.nifti_pieces", None)
    assert b"".join(opened.scan_pieces(scan, 100)) == first
    monkeypatch.undo()
    kept = sum(map(len, opened._coarse.values()))
    b"".join(opened.scan_pieces(scan, None))
    assert sum(map(len, opened._coarse.values())) == kept
    monkeypatch.setattr("panorgan.viewer.volumes.COARSE", 1000)
    b"".join(opened.scan_pieces(scan, 2000))
    assert sum(map(len, opened._coarse.values())) == kept
    for most in range(2, 40):
        opened.scan_pieces(scan, most)
    assert len(opened._coarse) <= 24
    opened.close()


def test_many_at_once_read_a_scan_once(session, monkeypatch):
    calls = []
    original = session_module.Volumes.scan

    def counted(self, scan):
        calls.append(scan)
        return original(self, scan)

    monkeypatch.setattr(session_module.Volumes, "scan", counted)
    threads = [threading.Thread(target=get, args=(session, "scan/1/0?most=77")) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_the_address_says_what_is_shown_first(nnunet_folder):
    study = open_study(nnunet_folder)
    with Session(study, "b2", "spleen") as running:
        assert running.url == f"{running.server.url}?number=1&organ=spleen"
    with Session(study, "a1") as running:
        assert running.url.endswith("?number=0"), "the first case is not the same as none: that is the worst"
    with refused("no-such-case"):
        Session(study, "nobody")


def test_the_worst_case_is_that_of_the_list():
    scores = ({"liver": 0.9, "spleen": 0.1}, {"liver": 0.4, "spleen": 0.8}, {"liver": 0.3}, {})
    pane = Pane("Prediction", Scan(Path("x")))
    cases = [ViewedCase(str(n), (replace(pane, dice=dice),)) for n, dice in enumerate(scores)]
    assert worst(cases, "") == 2
    assert worst(cases, "spleen") == 0
    assert worst(cases, "heart") == 2, "no case has a score of it"
    assert worst(cases[3:], "") == 0


# -- pages ---------------------------------------------------------------------------------------------------------

PAGE = """<html><head><meta http-equiv="Content-Security-Policy" content="{policy}">
<style></style></head><body><span class="view-link"></span></body></html>"""


@pytest.mark.parametrize(
    ("policy", "scripts"),
    [
        ("default-src &#39;none&#39;; img-src data:", "script-src 'self'"),
        ("default-src &#39;none&#39;; script-src &#39;sha256-abc=&#39;", "script-src 'sha256-abc=' 'self'"),
    ],
)
def test_a_page_keeps_its_policy_and_lets_one_script_of_the_viewer_in(policy, scripts):
    page = with_links(PAGE.format(policy=policy))
    found = html.unescape(page.partition('Policy" content="')[2].partition('"')[0])
    assert scripts in found.split("; ")
    assert "default-src 'none'" in found.split("; ")
    assert "unsafe" not in found
    assert page.count("<script") == 1


def test_only_the_page_of_the_study_is_served(session, nnunet_folder):
    assert get(session, "page")[0] == 404
    (nnunet_folder / "doctor.html").write_text("another page")
    assert get(session, "page")[0] == 404
