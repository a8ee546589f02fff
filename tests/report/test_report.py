"""The report page: complete, self-contained, true to metrics.csv, and calm when something is missing."""

from __future__ import annotations

import base64
import html
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from browser import blocked, visit

from panorgan.config import Experiment
from panorgan.data.volume import write_labels
from panorgan.errors import RunError
from panorgan.evaluation.metrics import METRICS, Metric, score
from panorgan.evaluation.statistics import organ_site_table
from panorgan.federation.events import EventLog
from panorgan.report import write_report
from panorgan.workflows.prepare import prepare
from panorgan.workflows.run import Run
from panorgan.workflows.tables import Row, read_metrics, write_metrics

ORGANS = ("liver", "spleen")
ANNOTATED = {"north": ("liver",), "south": ("spleen",), "island": ()}
SHAPE, SPACING = (24, 20, 8), (4.0, 4.0, 6.0)


class Page(HTMLParser):
    """What a test wants to know of a page: tags with attributes, text, and the text of each heat map cell."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.cells: dict[tuple[str, str], str] = {}
        self._cell: tuple[str, str] | None = None
        self._style = False
        self.feed(self.source)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self._style = tag == "style"
        if tag == "td" and "data-place" in found:
            self._cell = (str(found["data-organ"]), str(found["data-place"]))
            self.cells[self._cell] = ""

    def handle_endtag(self, tag: str) -> None:
        self._style = False
        if tag == "td":
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._style:
            return
        self.words.append(data)
        if self._cell:
            self.cells[self._cell] += data


# -- a small run ---------------------------------------------------------------------------------------------


def write_site(folder: Path, labels: tuple[str, ...], cases: int, flip: bool, seed: int) -> None:
    """An nnU-Net folder of tiny scans: a liver on the patient's right, a spleen on the left."""
    generator = np.random.default_rng(seed)
    for part in ("imagesTr", "labelsTr"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    ids = {organ: number for number, organ in enumerate(labels, start=1)}
    (folder / "dataset.json").write_text(json.dumps({"labels": {"background": 0, **ids}, "file_ending": ".nii.gz"}))
    sign = -1 if flip else 1
    affine = np.diag([sign * SPACING[0], sign * SPACING[1], SPACING[2], 1.0])
    for number in range(cases):
        ras = np.zeros((2, *SHAPE), dtype=bool)
        ras[0, 13:21, 5:14, 2:6] = True
        ras[1, 3:7, 5:9, 3:6] = True
        masks = ras[:, ::-1, ::-1] if flip else ras
        scan = generator.normal(-80, 10, SHAPE) + 150 * masks.any(axis=0)
        name = f"{folder.name}_{number}"
        nib.save(nib.Nifti1Image(scan.astype(np.int16), affine), folder / "imagesTr" / f"{name}_0000.nii.gz")
        written = np.zeros(SHAPE, dtype=np.uint8)
        for organ, id_ in ids.items():
            written[masks[ORGANS.index(organ)]] = id_
        write_labels(folder / "labelsTr" / f"{name}.nii.gz", written, affine)


def make_experiment(data: Path, name: str) -> Experiment:
    sites: dict[str, dict[str, Any]] = {}
    for seed, (site, annotated) in enumerate(ANNOTATED.items()):
        write_site(data / site, annotated or ORGANS, 6, site == "south", seed)
        write_site(data / "withheld" / site, ORGANS, 6, site == "south", seed)
        sites[site] = {"folder": data / site, "withheld": data / "withheld" / site, "external": not annotated}
    shared: dict[str, Any] = {"plan": {"spacing_mm": (8, 8, 8)}, "splits": {"balanced": True}}  # two tests per site
    return Experiment(name=name, vocabulary=ORGANS, sites=sites, **shared)


def write_predictions(experiment: Experiment, run: Path, cache: Path) -> list[Row]:
    """The truth, shifted by a growing number of voxels; the last spleen is missed altogether."""
    rows: list[Row] = []
    federation = prepare(experiment, cache)
    cases = [(site, case) for site in federation.sites for case in site.test]
    for number, (site, case) in enumerate(cases):
        image = case.read_image()
        labels = np.zeros(SHAPE, dtype=np.uint8)
        for organ, truth in case.read_masks(image).items():
            predicted = np.roll(truth, number % 4, axis=1)
            if organ == "spleen" and number == len(cases) - 1:
                predicted = np.zeros_like(truth)
            labels[predicted] = ORGANS.index(organ) + 1
            row: Row = {"split": "external" if site.external else "test", "site": site.name, "case": case.id}
            rows.append(row | {"organ": organ} | score(predicted, truth, image.spacing))
        path = run / "predictions" / site.name / f"{case.id}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_labels(path, labels, image.affine)
    return rows


def write_round(events: EventLog, number: int, validated: bool = True, **changes: Any) -> None:
    dice = {"north": {"liver": 0.2 * number}, "south": {"spleen": 0.1 * number}}
    facts = {
        "number": number,
        "stage": "train",
        "round": number,
        "rounds": 3,
        "total": 3,
        "sites": {site: {"cases": 4.0, "loss": 1.0 / number} for site in ("north", "south")},
        "validation": dice if validated else None,
        "best": None,
        "bytes_sent": 2_000_000,
        "bytes_received": 1_000_000,
        "seconds": {"sites": 10.0, "aggregate": 1.0, "validate": 2.0, "checkpoint": 0.5},
    }
    events.record("round", **{**facts, **changes})


def write_manifest(experiment: Experiment, run: Path) -> None:
    sites = {
        site: {
            "external": not annotated,
            "annotated": list(annotated),
            "cases": {"train": 3, "validation": 1, "test": 2},
        }
        for site, annotated in ANNOTATED.items()
    }
    manifest = {
        "run": "abc123",
        "created": "2025-03-04T05:06:07+0000",
        "experiment": experiment.as_json(),
        "fingerprint": "fp-experiment",
        "sites": sites,
        "data_fingerprint": "fp-data",
        "versions": {"panorgan": "9.9.9", "torch": "2.0"},
        "git": None,
        "hardware": {"device": "cpu", "cores": 2},
    }
    (run / "manifest.json").write_text(json.dumps(manifest))


MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Builds a scored run; every piece of it can be left out or changed afterwards."""

    def make(name: str = "two organs", validated: bool = True) -> Path:
        run = tmp_path / "run"
        (run / "model").mkdir(parents=True)
        experiment = make_experiment(tmp_path / "data", name)
        write_manifest(experiment, run)
        write_metrics(run / "metrics.csv", write_predictions(experiment, run, tmp_path / "cache"))
        (run / "model" / "model.json").write_text(json.dumps({"round": 2, "parameters": 1234567}))
        events = EventLog(run / "events.jsonl")
        events.record("started", run="abc123", method="fedavg")
        facts = {"north": {"train_cases": 3, "annotated": {"liver": 3}}}
        events.record("joined", sites={**facts, "south": {"train_cases": 3, "annotated": {"spleen": 3}}})
        for number in (1, 2, 3):
            write_round(events, number, validated)
        events.record("finished", rows=10)
        return run

    return make


@pytest.fixture
def run(make_run: MakeRun) -> Path:
    return make_run()


def report(run: Path) -> Page:
    return Page(write_report(run, run.parent / "cache"))


# -- the page ------------------------------------------------------------------------------------------------


def test_page_is_self_contained(run: Path) -> None:
    page = report(run)
    assert not re.search(r"https?://|//cdn|@import|url\(", page.source)
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object")
        for name in ("src", "href", "srcset", "xlink:href"):
            target = attributes.get(name)
            assert target is None or target.startswith(("data:image/", "#"))
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "case-data"}, {}]
    assert page.source.startswith("<!doctype html>")


def test_links_lead_to_sections_of_the_page(run: Path) -> None:
    page = report(run)
    ids = {attributes.get("id") for _, attributes in page.tags}
    links = [str(attributes["href"]) for tag, attributes in page.tags if tag == "a"]
    assert len(links) >= 6
    assert {link.removeprefix("#") for link in links} <= ids


def test_every_image_has_words(run: Path) -> None:
    page = report(run)
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    slices = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("class") == "slice"]
    plots = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("class") == "points"]
    assert len(images) == 4
    assert len(slices) == 6  # best, median and worst of two organs
    assert all(len(str(attributes["alt"])) > 20 for attributes in images)
    assert all("Dice" in str(attributes["aria-label"]) for attributes in slices)
    assert ["Liver, federation: median" in str(attributes["aria-label"]) for attributes in plots] == [True]


def test_names_every_organ_and_site(run: Path) -> None:
    text = report(run).text
    for name in ("Liver", "Spleen", "north", "south", "island", "FedAvg", "1,234,567", "fp-experiment", "fp-data"):
        assert name in text


def test_numbers_are_those_of_metrics_csv(run: Path) -> None:
    page = report(run)
    rows = [{**row, "missed": math.isnan(row["hd95"])} for row in read_metrics(run / "metrics.csv")]
    table = organ_site_table(rows)
    for (organ, site), summary in table.cells.items():
        assert page.cells[organ, site].startswith(f"{summary.mean:.2f}")
    for organ, summary in table.organs.items():
        assert page.cells[organ, "federation"].startswith(f"{summary.mean:.2f}")
        assert f"{summary.mean:.3f} ± {summary.sd:.3f}" in page.text
        assert f"{summary.low:.3f} to {summary.high:.3f}" in page.text
    assert page.cells["all", "federation"].startswith(f"{table.overall.mean:.2f}")
    assert page.cells["all", "island"].startswith(f"{table.external.mean:.2f}")
    for metric, digits in (("hd95", 1), ("assd", 1), ("nsd", 2)):
        found = organ_site_table(rows, metric).organs["liver"]
        assert f"{found.mean:.{digits}f} ± {found.sd:.{digits}f}" in page.text
        assert METRICS[metric].column in page.text


def test_an_added_metric_has_a_column(make_run: MakeRun, added_metric: Metric) -> None:
    run = make_run()
    rows = read_metrics(run / "metrics.csv")
    page = report(run)
    found = organ_site_table(rows, "precision").organs["liver"]
    assert '<th scope="col">Precision</th>' in page.source
    assert f"<td>{found.mean:.2f} ± {found.sd:.2f}</td>" in page.source
    assert added_metric.sentence in page.text


def test_a_run_that_was_scored_before_a_metric_was_added(run: Path, added_metric: Metric) -> None:
    assert "Precision" not in report(run).text


def test_cells_mark_who_labelled_the_organ(run: Path) -> None:
    page = report(run)
    own = {
        (attributes["data-organ"], attributes["data-place"])
        for tag, attributes in page.tags
        if tag == "td" and "data-place" in attributes and "own" in str(attributes["class"]).split()
    }
    assert own == {("liver", "north"), ("spleen", "south")}


def test_headline_splits_labelled_and_never_labelled(run: Path) -> None:
    page = report(run)
    rows = [row for row in read_metrics(run / "metrics.csv") if row["split"] == "test"]
    own = [row["dice"] for row in rows if row["organ"] in ANNOTATED[row["site"]]]
    others = [row["dice"] for row in rows if row["organ"] not in ANNOTATED[row["site"]]]
    assert f"Organs a site labelled itself {np.mean(own):.2f}" in page.text
    assert f"Organs a site never labelled {np.mean(others):.2f}" in page.text


def test_miss_is_counted(run: Path) -> None:
    record = Run(run)
    assert sum(row["missed"] for row in record.scores) == 1
    assert "A miss counts as 0. There was one:" in report(run).text


def test_hostile_name_is_only_text(make_run: MakeRun) -> None:
    page = report(make_run("<script>alert(1)<script>"))
    assert page.source.count("<script") == 2  # the page's own, and its data
    assert "&lt;script&gt;alert(1)&lt;script&gt;" in page.source
    assert "<script>alert(1)<script>" in page.text


def test_same_run_gives_the_same_bytes(run: Path) -> None:
    first = report(run).source
    assert report(run).source == first


# -- rounds and happenings -----------------------------------------------------------------------------------


def test_round_that_happened_twice_counts_as_the_last_time(run: Path) -> None:
    seconds = {"sites": 40.0, "aggregate": 1.0, "validate": 2.0, "checkpoint": 0.5}
    events = EventLog(run / "events.jsonl")
    events.record("resumed", run="abc123", method="fedavg")
    write_round(events, 3, bytes_sent=5_000_000, seconds=seconds)
    record = Run(run)
    assert [round_.number for round_ in record.rounds] == [1, 2, 3]
    assert record.rounds[2].bytes_sent == 5_000_000
    text = report(run).text
    assert "3 rounds took 1 min 10 s" in text  # 13.5 + 13.5 + 43.5 seconds, rounded half to even
    assert "9.0 MB" in text  # 2 + 2 + 5
    assert "The run was interrupted and resumed." in text


def test_an_extension_is_no_interruption_and_notices_lead_to_a_next_step(run: Path) -> None:
    events = EventLog(run / "events.jsonl")
    events.record("notice", number=3, code="extended", text="The run is extended.")
    events.record("resumed", run="abc123", method="fedavg", extended=True)
    text = report(run).text
    assert "interrupted and resumed" not in text
    assert "1 notice of the run" not in text
    events.record("notice", number=3, code="organ-not-found", text="The spleen is not found.")
    assert "1 notice of the run" in (text := report(run).text)
    assert text.count("The spleen is not found.") == 2


def test_refused_update_is_told(run: Path) -> None:
    assert "interruptions" not in report(run).text
    reason = "Site south sent values that are not finite."
    EventLog(run / "events.jsonl").record("refused", number=2, site="south", reason=reason, why="NaN in 'head'")
    EventLog(run / "events.jsonl").record("notice", number=4, text="No teacher knows liver.")
    text = report(run).text
    assert f"Round 2: the update of south was refused. {reason} NaN in 'head'" in text
    assert "Round 4: No teacher knows liver." in text


def test_mean_dice_is_the_mean_of_site_means(run: Path) -> None:
    last = Run(run).rounds[-1]
    assert last.mean_dice == pytest.approx((0.6 + 0.3) / 2)
    assert last.organ_dice("spleen") == pytest.approx(0.3)
    assert math.isnan(last.organ_dice("aorta"))


def test_without_validation_there_is_no_curve_of_dice(make_run: MakeRun) -> None:
    page = report(make_run(validated=False))
    headings = [attributes.get("alt", "") for tag, attributes in page.tags if tag == "img"]
    assert not any("validation Dice" in str(heading) for heading in headings)
    assert "Nothing was validated during training" in page.text


# -- missing pieces ------------------------------------------------------------------------------------------


def test_folder_without_scores_is_refused(run: Path) -> None:
    (run / "metrics.csv").unlink()
    with pytest.raises(RunError) as caught:
        write_report(run)
    assert caught.value.code == "no-scores"
    assert not (run / "report.html").exists()


def test_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        write_report(tmp_path)
    assert caught.value.code == "not-a-run"


def test_manifest_of_another_shape_is_refused(run: Path) -> None:
    (run / "manifest.json").write_text(json.dumps({"run": "abc"}))
    with pytest.raises(RunError) as caught:
        write_report(run)
    assert caught.value.code == "run-not-understood"


def test_moved_data_leaves_a_sentence(run: Path) -> None:
    shutil.move(run.parent / "data", run.parent / "elsewhere")
    page = report(run)
    assert "The scans of this run cannot be shown" in page.text
    assert str(run.parent) not in page.text.split("Manifest")[0]
    assert not any(tag == "image" for tag, _ in page.tags)
    assert page.cells["liver", "north"]


def test_changed_prediction_is_not_shown_under_an_old_score(run: Path) -> None:
    for path in (run / "predictions" / "north").iterdir():
        old = nib.load(path)
        write_labels(path, np.zeros(SHAPE, dtype=np.uint8), old.affine)
    assert "no longer give the score that was recorded" in report(run).text


def test_scores_alone_are_enough(run: Path) -> None:
    (run / "events.jsonl").unlink()
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "predictions")
    page = report(run)
    assert "Learning curves" not in page.text
    assert page.cells["spleen", "island"]


def test_no_external_site_and_only_own_organs(run: Path) -> None:
    rows = read_metrics(run / "metrics.csv")
    write_metrics(run / "metrics.csv", [row for row in rows if row["organ"] in ANNOTATED[row["site"]]])
    page = report(run)
    assert page.cells["spleen", "north"].startswith("–")
    assert "never labelled" not in page.text.split("Who annotated what")[0]
    assert "Mean Dice at external sites" not in page.text


def test_no_rows_at_all(run: Path) -> None:
    write_metrics(run / "metrics.csv", [])
    assert all(text.startswith("–") for text in report(run).cells.values())


# -- overlays ------------------------------------------------------------------------------------------------


def test_overlay_keeps_the_proportions_of_the_body(run: Path) -> None:
    page = report(run)
    boxes = [str(a["viewbox"]).split() for tag, a in page.tags if tag == "svg" and a.get("class") == "slice"]
    # All of the 24 × 20 voxels are tissue, 4 mm each.
    assert {(float(box[2]), float(box[3])) for box in boxes} == {(96.0, 80.0)}
    scans = [str(a["href"]) for tag, a in page.tags if tag == "image"]
    assert all(base64.b64decode(scan.split(",")[1]).startswith(b"\xff\xd8") for scan in scans)


# -- in a browser --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_page_never_scrolls_sideways(run: Path, tmp_path: Path, width: int) -> None:
    """Laid out by Chromium in a frame, because a headless window cannot be as narrow as a telephone."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    content = html.escape(report(run).source)
    measure = "document.title = 'width ' + this.contentDocument.documentElement.scrollWidth"
    wrapper = tmp_path / "frame.html"
    wrapper.write_text(f'<iframe width="{width}" height="900" onload="{measure}" srcdoc="{content}"></iframe>')
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [chromium, *options, profile, "--dump-dom", wrapper.as_uri()]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<title>width (\d+)</title>", answer.stdout)
    assert found is not None, answer.stderr[-500:]
    assert int(found[1]) <= width


@pytest.mark.slow
def test_the_content_policy_blocks_nothing_of_the_report(run: Path, tmp_path: Path) -> None:
    page = report(run).source
    assert "Content-Security-Policy" in page
    assert "data:image" in page
    assert blocked(visit(page, tmp_path)[1]) == []
