"""The files of a comparison: three methods × two seeds, trained for two rounds, read as a person or a program would."""

from __future__ import annotations

import csv
import html
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import blocked, visit
from made_ablation import Made
from tab import tab

from panorgan.checksums import read_json, sealed_json
from panorgan.config import Experiment
from panorgan.errors import DataError, RunError
from panorgan.evaluation.comparison import Figure
from panorgan.evaluation.metrics import Metric
from panorgan.federation.events import EventLog, Listener, read_events
from panorgan.methods.shared.ablation import AblationRow
from panorgan.report import comparison_tables as tables
from panorgan.report.ablation import page as ablation_page
from panorgan.report.comparison import write_comparison
from panorgan.report.comparison_figures import looks, wrap_label
from panorgan.report.comparison_results import ComparisonFiles, Results, compare_runs
from panorgan.report.delivered_rounds import delivered_line
from panorgan.workflows.compare import ComparisonPlan, Failure, Planned, check_comparison, plan_comparison, run_missing
from panorgan.workflows.tables import read_metrics, write_metrics

METHODS = "solo,fedavg,held tight=fedprox+mu=0.5"


@contextmanager
def unwatched(run: Planned, number: int, total: int) -> Iterator[Listener]:
    yield lambda event: None


@pytest.fixture(scope="module")
def trained(tiny: Callable[..., Experiment], tmp_path_factory: pytest.TempPathFactory, cache: Path) -> ComparisonPlan:
    experiment = tiny(name="a <b>name<b>", training={"rounds": 2, "validate_every": 1}, local_models=True)
    plan = plan_comparison(experiment, METHODS, "0,1", folder=tmp_path_factory.mktemp("compare") / "compared")
    check_comparison(plan)
    assert run_missing(plan, unwatched) == []
    write_comparison(compare_runs(plan))
    return plan


@pytest.fixture
def copied(trained: ComparisonPlan, tmp_path: Path) -> ComparisonPlan:
    """The same comparison, to be spoiled."""
    folder = tmp_path / "copy"
    shutil.copytree(trained.folder, folder)
    return plan_comparison(trained.runs[1].experiment, METHODS, "0,1", folder=folder)


class Page(HTMLParser):
    """Tags of a page, its text, and the cells of its tables by (method, organ, place)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: dict[tuple[str, str, str], str] = {}
        self.text = ""
        self._cell: tuple[str, str, str] | None = None
        self.feed(self.source)
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag == "td":
            keys = [str(found.get(f"data-{name}")) for name in ("method", "organ", "place")]
            self._cell = (keys[0], keys[1], keys[2])
            self.cells[self._cell] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "td":
            self._cell = None

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._cell is not None:
            self.cells[self._cell] += data


@pytest.fixture(scope="module")
def page(trained: ComparisonPlan) -> Page:
    return Page(ComparisonFiles(trained.folder).page)


def seed_means(plan: ComparisonPlan, method: str, wanted: Callable[[dict[str, Any]], bool]) -> list[float]:
    runs = [run for run in plan.runs if run.entry.label == method]
    return [float(np.mean([r["dice"] for r in read_metrics(run.folder.scores_file) if wanted(r)])) for run in runs]


def test_page_shows_what_the_runs_scored(trained: ComparisonPlan, page: Page) -> None:
    for method in trained.labels:
        for place, wanted in {
            "federation": lambda row: row["split"] == "test",
            "external sites": lambda row: row["split"] == "external",
            "labelled here": lambda row: (
                row["split"] == "test" and (row["site"] == "north") == (row["organ"] == "liver")
            ),
        }.items():
            means = seed_means(trained, method, wanted)
            text = f"{np.mean(means):.3f} ± {np.std(means, ddof=1):.3f}"
            assert page.cells[method, "all", place].startswith(text)
        means = seed_means(trained, method, lambda row: row["site"] == "south" and row["organ"] == "spleen")
        assert page.cells[method, "spleen", "south"].startswith(f"{np.mean(means):.3f} ±")


def test_page_is_self_contained_and_names_are_only_text(page: Page) -> None:
    assert not re.search(r"https?://|//cdn|@import|url\(", page.source)
    ids = {attributes.get("id") for _, attributes in page.tags}
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object")
        for name in ("src", "href"):
            target = attributes.get(name)
            assert target is None or target.startswith("data:image/") or target.removeprefix("#") in ids
    assert [a for tag, a in page.tags if tag == "script"] == [{"type": "application/json", "id": "case-data"}, {}]
    assert "b" not in {tag for tag, _ in page.tags}
    assert "a <b>name<b>" in page.text


def test_page_has_curves_boxes_costs_and_what_is_forgotten(page: Page) -> None:
    alts = [str(attributes["alt"]) for tag, attributes in page.tags if tag == "img"]
    assert sum("validation Dice" in alt for alt in alts) == 4  # mean, liver, spleen, both kidneys
    plots = [str(a["aria-label"]) for tag, a in page.tags if tag == "svg" and a.get("class") == "points"]
    assert sum("median Dice" in plot for plot in plots) == 4  # organs of the vocabulary
    assert all("fedavg" in words for words in (*alts, *plots))
    assert "What sites forget" in page.text
    assert "CPU (" in page.text
    assert "not tested: " in page.text  # the tiny federation tests too few patients


def test_csv_and_json_hold_every_figure(trained: ComparisonPlan) -> None:
    files = ComparisonFiles(trained.folder)
    rows = list(csv.DictReader(files.scores.open()))
    content = json.loads(files.data.read_text())
    assert len(rows) == len(content["figures"])
    wanted = {"method": "held tight", "organ": "liver", "place": "site", "site": "north"}
    (row,) = [r for r in rows if wanted.items() <= r.items()]
    (figure,) = [f for f in content["figures"] if wanted.items() <= f.items()]
    means = seed_means(trained, "held tight", lambda r: r["site"] == "north" and r["organ"] == "liver")
    assert float(row["mean"]) == figure["mean"] == pytest.approx(np.mean(means))
    assert float(row["sd"]) == figure["sd"] == pytest.approx(np.std(means, ddof=1))
    assert row["p"] == ""  # too few patients
    assert figure["p"] is None
    assert content["methods"]["held tight"] == {"method": "fedprox", "settings": {"mu": 0.5}}
    assert [run["seed"] for run in content["runs"] if run["method"] == "solo"] == [0, 1]
    costs = {row["method"]: row for row in csv.DictReader(files.costs.open())}
    assert float(costs["fedavg"]["steps"]) == 2 * 2 * 2  # rounds × sites × local steps
    assert int(costs["solo"]["parameters"]) > int(costs["fedavg"]["parameters"])  # one network per site
    assert set(content["inference"]["seconds"]) == set(trained.labels)
    assert set(content["forgetting"]) == {"fedavg", "held tight"}  # solo averages nothing


def test_page_tells_external_sites_where_these_alone_were_scored(copied: ComparisonPlan) -> None:
    for run in copied.runs:
        rows = read_metrics(run.folder.scores_file)
        write_metrics(run.folder.scores_file, [row for row in rows if row["split"] == "external"])
    page = Page(write_comparison(compare_runs(copied)).page)
    assert {place for _, _, place in page.cells} == {"external sites", "island", "None"}
    assert page.cells["solo", "liver", "external sites"].strip() not in ("", "–")
    assert "at external sites" in page.text
    assert "in the federation, nothing was scored" in page.text
    assert "Sites of the federation" not in page.text


def test_cells_draw_together_where_columns_are_many(copied: ComparisonPlan) -> None:
    """Three methods and five columns of distances have room; four methods more, and a page would hide the last one."""

    def tables_of(results: Results) -> list[str | None]:
        classes = [found.get("class") for tag, found in Page(write_comparison(results).page).tags if tag == "table"]
        return [name for name in classes if name and name.startswith("compare")]

    results = compare_runs(copied)
    assert tables_of(results) == ["compare", "compare gains", "compare", "compare distances", "compare"]
    more = [replace(copied.entries[0], label=f"again {number}") for number in range(4)]
    wide = replace(results, plan=replace(copied, entries=(*copied.entries, *more)))
    assert tables_of(wide) == ["compare", "compare gains", "compare many", "compare distances", "compare many"]


def test_page_shows_distances_and_what_was_missed(copied: ComparisonPlan) -> None:
    """solo: 2 mm everywhere in seed 0 and 4 in seed 1. The others: always 1, but fedavg misses a liver at the south."""
    for run in copied.runs:
        rows = read_metrics(run.folder.scores_file)
        for row in rows:
            row["assd"] = {"solo · seed 0": 2.0, "solo · seed 1": 4.0}.get(run.title, 1.0)
        if run.title == "fedavg · seed 0":
            next(row for row in rows if (row["site"], row["organ"]) == ("south", "liver"))["assd"] = math.nan
        write_metrics(run.folder.scores_file, rows)
    files = write_comparison(compare_runs(copied))
    section = files.page.read_text().split('<section id="distances"')[1].split("</section>")[0]
    found = re.findall(
        r'<td data-method="(.+?)" data-organ="(.+?)" data-metric="assd" data-at="(.+?)".*?>(.*?)</td>', section
    )
    cells = {(method, organ, place): html.unescape(text) for method, organ, place, text in found}
    assert len(cells) == len(found) == 3 * (4 + 1) * 2  # methods × organs and all of them × inside and outside
    assert cells["solo", "all", "federation"] == cells["solo", "spleen", "external sites"] == "3.00 ± 1.41"
    assert cells["fedavg", "liver", "federation"] == '1.00 ± 0.00<span class="sub">1 missed</span>'
    assert cells["fedavg", "all", "federation"] == '1.00 ± 0.00<span class="sub">1 missed</span>'
    assert cells["fedavg", "liver", "external sites"] == cells["held tight", "liver", "federation"] == "1.00 ± 0.00"
    assert "ASSD was not tested" in section
    written = {(r["method"], r["organ"], r["place"]): r for r in csv.DictReader(files.metric("assd").open())}
    assert written["fedavg", "all", "federation"]["missed"] == "1"
    assert "| solo | 3.00 ± 1.41 |" in files.markdown.read_text()


def test_pages_show_an_added_metric(copied: ComparisonPlan, added_metric: Metric) -> None:
    for run in copied.runs:
        rows = read_metrics(run.folder.scores_file)
        write_metrics(run.folder.scores_file, [{**row, "precision": 0.25 + 0.5 * run.seed} for row in rows])
    results = compare_runs(copied)
    files = write_comparison(results)
    section = files.page.read_text().split('<section id="metric_precision"')[1].split("</section>")[0]
    assert section.count(">0.500 ± 0.354</td>") == 3 * (4 + 1) * 2
    assert files.metric("precision") in files.all
    ablation = Made("ufps", tuple(AblationRow(label, ()) for label in copied.labels), copied)
    modules = ablation_page(ablation, results).split('<section id="modules"')[1].split("</section>")[0]
    assert modules.count('<td data-metric="precision">0.500 ± 0.354</td>') == 3


def test_markdown_is_well_formed(trained: ComparisonPlan) -> None:
    text = ComparisonFiles(trained.folder).markdown.read_text()
    assert r"# a \<b\>name\<b\>: 3 methods compared" in text
    for heading in ("Summary", "Federation", "north", "south", r"island (external)", "Cost", "How it was computed"):
        assert f"## {heading}\n" in text
    blocks = [b.splitlines() for b in text.split("\n\n") if b.startswith("| ")]
    assert all(len({line.count(" | ") for line in block if "---" not in line}) == 1 for block in blocks)


def test_written_again_it_is_the_same_to_the_byte(trained: ComparisonPlan) -> None:
    """Times of inference are kept, as long as the models are the same ones."""
    files = ComparisonFiles(trained.folder)
    before = {path.name: path.read_bytes() for path in files.all}
    write_comparison(compare_runs(trained))
    assert {path.name: path.read_bytes() for path in files.all} == before


def test_a_gap_shows_and_the_rest_is_compared(copied: ComparisonPlan) -> None:
    lost = next(run for run in copied.runs if run.title == "fedavg · seed 1")
    lost.folder.scores_file.unlink()
    results = compare_runs(copied, [Failure(lost, RunError("The disk <burnt>."))])
    page = Page(write_comparison(results).page)
    assert "1 run of 6 is not finished." in page.text
    assert "fedavg · seed 1: The disk <burnt>." in page.text
    only = seed_means(copied_without(copied, lost), "fedavg", lambda row: row["split"] == "test")
    assert page.cells["fedavg", "all", "federation"].startswith(f"{only[0]:.3f}")
    assert "±" not in page.cells["fedavg", "all", "federation"]
    ours = results.comparison.figure("solo")
    assert ours is not None
    assert ours.seeds == 2
    assert not math.isnan(ours.difference)  # over the seed that both have


def copied_without(plan: ComparisonPlan, lost: Planned) -> ComparisonPlan:
    return ComparisonPlan(
        plan.name, plan.folder, plan.entries, plan.seeds, plan.reference, tuple(r for r in plan.runs if r is not lost)
    )


def deliver_round(plan: ComparisonPlan, title: str, number: int) -> Planned:
    """Let a run say that it delivers another round."""
    run = next(run for run in plan.runs if run.title == title)
    card = run.folder.model_folder / "model.json"
    card.write_text(sealed_json({**read_json(card.read_bytes()), "round": number}))
    return run


def test_every_table_says_which_round_is_delivered(copied: ComparisonPlan) -> None:
    for run in copied.runs:
        deliver_round(copied, run.title, 2)
    early = deliver_round(copied, "fedavg · seed 1", 1)
    notice = "The delivered model is that of round 1 of 2 <b>."
    EventLog(early.folder.events_file).record("notice", number=2, code="delivered-early", text=notice)
    next(run for run in copied.runs if run.title == "solo · seed 0").folder.model_folder.joinpath("model.json").unlink()
    results = compare_runs(copied)
    files = write_comparison(results)
    wanted = {"solo": "–, 2 of 2", "fedavg": "2, 1 of 2", "held tight": "2, 2 of 2"}
    shown = re.findall(r'data-delivered="(.*?)">(.*?)<', files.page.read_text())
    assert dict(shown) == wanted
    assert f"fedavg · seed 1: {notice}" in Page(files.page).text
    markdown = files.markdown.read_text()
    summary = markdown[markdown.index("## Summary") : markdown.index("## Against every site alone")]
    rows = [line.strip("| ").split(" | ") for line in summary.splitlines() if line.startswith("| ")]
    assert {row[0]: row[-1] for row in rows if "---" not in row[0]} == {"method": "delivered round", **wanted}
    assert r"- fedavg · seed 1: The delivered model is that of round 1 of 2 \<b\>." in summary
    scores = {r["method"]: (r["rounds"], r["delivered_rounds"]) for r in csv.DictReader(files.scores.open())}
    assert scores == {"solo": ("2", "? 2"), "fedavg": ("2", "2 1"), "held tight": ("2", "2 2")}
    reported = [(r["method"], r["seed"], r["delivered_round"]) for r in json.loads(files.data.read_text())["runs"]]
    assert [entry for entry in reported if entry[0] == "fedavg"] == [("fedavg", 0, 2), ("fedavg", 1, 1)]
    assert delivered_line(results.runs) == (
        "Delivered rounds, by seed: solo –, 2 of 2; fedavg 2, 1 of 2; held tight 2, 2 of 2."
    )


def test_a_method_without_a_single_run_leaves_empty_cells(copied: ComparisonPlan) -> None:
    for run in copied.runs:
        if run.entry.label == "fedavg":
            shutil.rmtree(run.folder.path)
    page = Page(write_comparison(compare_runs(copied)).page)
    assert page.cells["fedavg", "liver", "federation"] == "–"
    assert page.cells["solo", "liver", "federation"] != "–"


def test_a_case_that_one_method_lacks_is_refused(copied: ComparisonPlan) -> None:
    run = next(run for run in copied.runs if run.title == "solo · seed 0")
    rows = read_metrics(run.folder.scores_file)
    write_metrics(run.folder.scores_file, [row for row in rows if (row["site"], row["organ"]) != ("south", "liver")])
    with pytest.raises(DataError, match="not scored on the same cases") as error:
        compare_runs(copied)
    assert "site south" in error.value.where


def test_nothing_finished_is_an_error(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        compare_runs(plan_comparison(tiny(), "fedavg", "0", folder=tmp_path))
    assert caught.value.code == "no-finished-run"


def test_data_that_is_gone_leaves_a_sentence(copied: ComparisonPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    from panorgan.workflows import compare_costs

    def gone(*_: object) -> None:
        raise RunError("The folder has moved.")

    monkeypatch.setattr(compare_costs, "read_sites", gone)
    results = compare_runs(copied)
    assert not results.patients_known
    assert "each counts as its own" in Page(write_comparison(results).page).text


def test_full_labels_in_training_do_not_change_who_labels_what(copied: ComparisonPlan) -> None:
    """A method that trains on withheld labels writes down that every site labels everything."""
    run = copied.runs[0]
    manifest = run.folder.manifest
    for site in manifest["sites"].values():
        site["annotated"] = manifest["experiment"]["vocabulary"]
    run.folder.manifest_file.write_text(json.dumps(manifest))
    results = compare_runs(copied)
    assert not results.labelled_here("north", "spleen")
    assert results.labelled_here("north", "liver")


def test_times_of_a_shared_machine_are_marked(copied: ComparisonPlan) -> None:
    """Also by --report-only: the runs themselves remember."""
    before = Page(write_comparison(compare_runs(copied)).page)
    assert "shared machine" not in before.text
    assert "1.00 ×" in before.text
    for run in copied.runs:
        (run.folder.path / "shared_machine.json").write_text('{"at_once": 2}')
    files = write_comparison(compare_runs(copied))
    page, text = Page(files.page), files.markdown.read_text()
    assert page.text.count("shared machine") == len(copied.labels)
    assert "1.00 ×" not in page.text
    assert "their times cannot be compared" in page.text
    assert text.count("(shared machine)") == len(copied.labels)
    costs = {row["method"]: row for row in csv.DictReader(files.costs.open())}
    assert (costs["solo"]["shared"], costs["solo"]["step_ratio"]) == ("True", "")


def test_traffic_of_a_round_and_of_the_whole_run(trained: ComparisonPlan) -> None:
    """Every round is validated: a run's messages are more than its rounds' training."""
    files = ComparisonFiles(trained.folder)
    cost = json.loads(files.data.read_text())["costs"]["fedavg"]
    rounds = [e.facts for e in read_events(trained.runs[1].folder.events_file) if e.kind == "round"]
    assert trained.runs[1].title == "fedavg · seed 0"
    assert cost["bytes_per_run"] == pytest.approx(sum(r["bytes_sent"] + r["bytes_received"] for r in rounds), rel=0.01)
    assert cost["bytes_per_round"] == pytest.approx(rounds[0]["bytes_training"], rel=0.01)
    assert cost["bytes_per_run"] > 2.5 * cost["bytes_per_round"]
    header = next(line for line in files.markdown.read_text().splitlines() if line.startswith("| method | steps"))
    assert "| per round | whole run |" in header


def test_intervals_have_the_digits_of_the_means(trained: ComparisonPlan) -> None:
    text = ComparisonFiles(trained.folder).markdown.read_text()
    numbers = re.findall(r"\[(0\.\d+), (0\.\d+)\]", text)
    assert numbers
    assert {len(number) for pair in numbers for number in pair} == {len("0.123")}


def test_words_of_a_figure() -> None:
    better = Figure(0.8124, 0.01, 0.78, 0.84, 3, 9, 0, difference=0.02, pairs=9, p=0.0004, p_holm=0.0008)
    assert tables.over_seeds(better) == "0.812 ± 0.010"
    assert tables.bracket(better) == "[0.780, 0.840]"
    assert (tables.p_value(better), tables.mark(better)) == ("p < 0.001", "▲")
    worse = Figure(0.5, math.nan, 0.5, 0.5, 1, 1, 0, difference=-0.02, pairs=6, p=0.03, p_holm=0.06)
    assert (tables.over_seeds(worse), tables.bracket(worse)) == ("0.500", "")
    assert (tables.p_value(worse), tables.mark(worse)) == ("p = 0.060", "")
    assert tables.signed(-0.0312) == "−0.031"
    assert (tables.milliseconds(0.0383), tables.milliseconds(1.238)) == ("38.3 ms", "1.24 s")
    assert tables.over_seeds(None) == tables.ratio(math.nan) == "–"


def test_every_method_has_its_own_look() -> None:
    methods = [f"m{i}" for i in range(12)]
    drawn = looks(methods, "m3")
    assert len({(look.colour, str(look.dashes)) for look in drawn.values()}) == 12
    assert drawn["m3"].width > drawn["m4"].width
    assert wrap_label("flkd+local_weight=0+global_weight=1", 16) == "flkd\n+local_weight=0\n+global_weight=1"


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_page_never_scrolls_sideways(page: Page, tmp_path: Path, width: int) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    measure = "document.title = 'width ' + this.contentDocument.documentElement.scrollWidth"
    wrapper = tmp_path / "frame.html"
    frame = f'<iframe width="{width}" height="900" onload="{measure}" srcdoc="{html.escape(page.source)}"></iframe>'
    wrapper.write_text(frame)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
    command = [chromium, *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", wrapper.as_uri()]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<title>width (\d+)</title>", answer.stdout)
    assert found is not None, answer.stderr[-500:]
    assert int(found[1]) <= width


@pytest.mark.slow
def test_the_content_policy_blocks_nothing_of_the_comparison(page: Page, tmp_path: Path) -> None:
    assert "Content-Security-Policy" in page.source
    assert blocked(visit(page.source, tmp_path)[1]) == []


@pytest.mark.slow
def test_a_point_opens_the_run_of_its_method(trained: ComparisonPlan, tmp_path: Path) -> None:
    folder = trained.folder.resolve()
    with tab(tmp_path) as browser:
        browser.open(ComparisonFiles(folder).page)
        row, x, y = browser.run(
            """(() => { const plot = document.querySelectorAll("svg.points")[1]; // the spleen's
            const path = plot.querySelector("[data-column='6'] .dots");
            path.scrollIntoView({ block: "center", behavior: "instant" });
            const [x, y] = path.getAttribute("d").match(/[\\d.]+,[\\d.]+/)[0].split(",").map(Number);
            const box = path.ownerSVGElement.getBoundingClientRect();
            const scale = box.width / path.ownerSVGElement.viewBox.baseVal.width;
            return [Number(path.dataset.rows.split(" ")[0]), box.left + x * scale, box.top + y * scale]; })()"""
        )
        browser.click(x, y)
        case, site = browser.text("tr[aria-current]").split("\t")[:2]
        assert browser.text(".said").startswith(f"{case} · {site} · Spleen · fedavg 0.")
        (data,) = re.findall('id="case-data">(.*?)</script>', ComparisonFiles(folder).page.read_text())
        seed = json.loads(data)["rows"][row][4]
        wanted = f"panorgan view {folder}/fedavg/seed-{seed} --case {case} --organ spleen"
        assert browser.text(".picked code") == wanted
        assert (folder / "fedavg" / f"seed-{seed}" / "predictions" / site / f"{case}.nii.gz").is_file()
        assert browser.log == []
