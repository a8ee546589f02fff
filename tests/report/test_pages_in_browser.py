"""Pages as a reader uses them, in Chromium: sort, filter, name an outlier, copy a table, by mouse and by keyboard."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import checkups
import pytest
from made_run import OUTLIER, made_run
from tab import Tab, tab

from panorgan.csv_cells import escape_cell
from panorgan.report import write_report
from panorgan.report.doctor_page import render

pytestmark = pytest.mark.slow

SITE, CASE, ORGAN, DICE = OUTLIER
ROW = "#case-list tbody tr"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of three sites, two organs and four cases each; its folder's name needs quotes in a shell."""
    folder = tmp_path_factory.mktemp("run") / "it's a run"
    return write_report(made_run(folder), folder.parent / "cache")


@pytest.fixture
def page(browser: Tab, report: Path) -> Tab:
    browser.log.clear()
    return browser.open(report)


def cells(page: Tab, column: int) -> list[str]:
    """What stands in a column of the case table."""
    script = f"[...document.querySelectorAll('{ROW}')].map(row => row.children[{column}].innerText)"
    return list(page.run(script))


def outlier_on_screen(page: Tab) -> tuple[float, float]:
    """Where the worst spleen is drawn."""
    x, y = page.run(
        f"""(() => {{
        const data = JSON.parse(document.getElementById("case-data").textContent);
        const wanted = data.rows.findIndex(row => row[data.leading] === {DICE});
        const rows = (path) => path.dataset.rows.split(" ").map(Number);
        const path = [...document.querySelectorAll(".dots")].find(p => rows(p).includes(wanted));
        const place = path.getAttribute("d").match(/[\\d.]+,[\\d.]+/g)[rows(path).indexOf(wanted)];
        path.scrollIntoView({{ block: "center", behavior: "instant" }});
        const box = path.ownerSVGElement.getBoundingClientRect();
        const scale = box.width / path.ownerSVGElement.viewBox.baseVal.width;
        const [x, y] = place.split(",").map(Number);
        return [box.left + x * scale, box.top + y * scale];
    }})()"""
    )
    return x, y


def test_the_worst_case_comes_first_and_columns_sort_both_ways(page: Tab) -> None:
    dice = [float(text) for text in cells(page, 4)]
    assert len(dice) == 3 * 4 * 2
    assert dice == sorted(dice)
    assert dice[:2] == [0.0, DICE]
    page.click_on('.case-rows th[data-column="4"] button')
    assert [float(text) for text in cells(page, 4)] == dice[::-1]
    assert page.run("document.querySelector('.case-rows th[data-column=\"4\"]').ariaSort") == "descending"
    page.click_on('.case-rows th[data-column="5"] button')  # HD95: the largest first, those without a value last
    distances = cells(page, 5)
    assert distances[-1] == "–"
    assert [float(text) for text in distances[:-1]] == sorted(map(float, distances[:-1]), reverse=True)
    assert page.run("[...document.querySelectorAll('.case-rows [aria-sort]')].map(head => head.innerText)") == [
        "HD95 (mm)"
    ]
    page.click_on('.case-rows th[data-column="5"] button')
    assert cells(page, 5)[-1] == "–"
    assert cells(page, 5)[:-1] == distances[-2::-1]


def test_it_sorts_by_keyboard(page: Tab) -> None:
    page.run("document.querySelector('.case-rows th[data-column=\"0\"] button').focus()")
    page.press("Enter")
    names = cells(page, 0)
    assert names == sorted(names)
    assert names[0] == "island_0"


def test_filters_narrow_the_rows(page: Tab) -> None:
    page.run("document.querySelector('#case-list input[type=search]').focus()")
    page.type("SOUTH")
    assert set(cells(page, 1)) == {"south"}
    assert page.text(".count") == "8 of 24 rows"
    page.run(
        """(() => { const [site, organ] = document.querySelectorAll("#case-list select");
        organ.value = [...organ.options].find(o => o.text === "Spleen").value;
        organ.dispatchEvent(new Event("change")); })()"""
    )
    assert page.text(".count") == "4 of 24 rows"
    page.run("document.querySelector('#case-list input[type=number]').focus()")
    page.type("0.5")
    assert cells(page, 0) == [CASE]
    page.run("document.querySelector('#case-list input[type=search]').select()")
    page.type("nobody")
    assert page.text(ROW) == "No case matches."


def test_an_outlier_is_named_where_one_points_and_found_where_one_clicks(page: Tab) -> None:
    x, y = outlier_on_screen(page)
    page.point(x + 2, y)
    assert page.text(".tip") == f"{CASE} · {SITE} · Spleen · Dice 0.100"
    page.point(x + 60, y)
    assert page.run("document.querySelector('.tip').hidden")
    page.click_on('.case-rows th[data-column="4"] button')  # the best first: the outlier is out of sight
    page.click(*outlier_on_screen(page))
    row = "tr[aria-current]"
    assert page.text(row).split("\t")[:3] == [CASE, SITE, "Spleen"]
    assert page.text(".said") == f"{CASE} · {SITE} · Spleen · Dice 0.100"
    assert page.run("document.querySelectorAll('.mark').length") == 1
    inside = page.run(
        f"""(() => {{ const r = document.querySelector("{row}").getBoundingClientRect();
        const b = document.querySelector(".tall").getBoundingClientRect();
        return r.top >= b.top && r.bottom <= b.bottom; }})()"""
    )
    assert inside, "the row can be seen"


def test_a_point_whose_row_is_filtered_out_is_found_nevertheless(page: Tab) -> None:
    page.run("document.querySelector('#case-list input[type=search]').focus()")
    page.type("north")
    page.click(*outlier_on_screen(page))
    assert page.text("tr[aria-current] th") == CASE
    assert page.text(".count") == "24 rows"


def test_a_row_shows_its_point_and_the_command_of_the_viewer(page: Tab, report: Path) -> None:
    page.run(f"document.querySelector('{ROW}').focus()")
    page.press("ArrowDown")
    page.press("Enter")
    assert page.text("tr[aria-current] th") == CASE
    assert page.run("document.querySelectorAll('.mark').length") == 1
    folder = str(report.parent).replace("'", "'\"'\"'")
    wanted = f"panorgan view '{folder}' --case {CASE} --organ {ORGAN}"
    assert page.text(".picked code") == wanted
    page.click_on(".picked .copy")
    assert page.run("navigator.clipboard.readText()") == wanted
    assert page.text(".picked .copy") == "Copied"


def test_a_case_of_two_sites_is_named_with_its_site(browser: Tab, report: Path, tmp_path: Path) -> None:
    twin = next(f"{site}_1" for site in ("north", "south") if site != SITE)
    text = report.read_text().replace(f'"{twin}"', f'"{CASE}"')
    changed = tmp_path / "report.html"
    changed.write_text(text)
    browser.log.clear()
    page = browser.open(changed)
    page.run(f"document.querySelector('{ROW}').focus()")
    page.press("ArrowDown")
    page.press("Enter")
    assert f"--case {SITE}/{CASE} " in page.text(".picked code")


def test_copied_latex_is_that_of_the_file_beside_the_page(page: Tab, report: Path) -> None:
    file = report.with_suffix(".tex").read_text()
    buttons = page.run("document.querySelectorAll('.export').length")
    assert buttons == file.count(r"\begin{table}") == 4
    copied = []
    for number in range(buttons):
        page.run(f"(document.querySelectorAll('.export')[{number}].open = true, 0)")
        page.run(f"document.querySelectorAll('.export')[{number}].querySelector('button').id = 'copy-{number}'")
        page.click_on(f"#copy-{number}")
        copied.append(page.run("navigator.clipboard.readText()"))
    assert copied == [part.split("\n", 1)[1] for part in re.split(r"\n(?=% [a-z]+\n)", file)]


def test_cases_are_copied_as_csv_as_filtered_and_saved(page: Tab, tmp_path: Path) -> None:
    page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.run("document.querySelector('#case-list input[type=search]').focus()")
    page.type("south_1")
    page.click_on("#case-list .tools button:nth-child(2)")
    rows = list(csv.reader(io.StringIO(page.run("navigator.clipboard.readText()"))))
    assert rows[0] == ["Case", "Site", "Organ", "Label", "Dice", "HD95 (mm)", "ASSD (mm)", "NSD"]
    assert [row[:3] for row in rows[1:]] == [[CASE, SITE, "Spleen"], [CASE, SITE, "Liver"]]
    page.click_on("#case-list .tools button:nth-child(4)")
    for _ in range(100):
        if (tmp_path / "cases.csv").is_file():
            break
        page.run("new Promise(done => setTimeout(done, 50))")
    assert list(csv.reader((tmp_path / "cases.csv").open())) == rows


def test_a_name_that_would_be_a_formula_is_copied_as_text(page: Tab) -> None:
    names = ["=1+1", "+0.5", "-1", '"a", b', "@x"]
    cells_of_one_row = "[" + ",".join(f"{{main: {json.dumps(name)}, small: '', span: 1}}" for name in names) + "]"
    text = page.run(f"Tables.csv({{head: [[]], body: [{cells_of_one_row}], foot: []}})")
    (row,) = list(csv.reader(io.StringIO(text)))[1:]
    assert row == [escape_cell(name) for name in names] == ["'=1+1", "+0.5", "-1", '"a", b', "'@x"]


def test_nothing_is_blocked_and_nothing_fails(page: Tab) -> None:
    assert page.log == []


@pytest.mark.parametrize("width", [400, 1280, 1920])
def test_it_is_dark_where_the_reader_wants_it_and_never_in_print(browser: Tab, report: Path, width: int) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    browser.open(report, width=width)
    assert browser.run(background) == "rgb(255, 255, 255)"
    browser.open(report, width=width, dark=True)
    assert browser.run(background) == "rgb(20, 25, 31)"
    assert browser.run("document.documentElement.scrollWidth") <= width
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.send("Emulation.setEmulatedMedia", media="print", features=dark)
    assert browser.run(background) == "rgb(255, 255, 255)"


def test_a_wide_screen_has_the_cases_beside_their_plot(browser: Tab, report: Path) -> None:
    places = (
        "['.plot', '.list'].map(s => document.querySelector(s).getBoundingClientRect()).map(b => [b.left, b.right])"
    )
    (_, right), (left, _) = browser.open(report, width=1920).run(places)
    assert right < left
    (_, right), (left, _) = browser.open(report, width=1280).run(places)
    assert right > left


def test_a_finding_of_the_doctor_is_found_from_its_dot(browser: Tab, tmp_path: Path) -> None:
    path = tmp_path / "doctor.html"
    path.write_text(render(checkups.sick(), "now"))
    browser.log.clear()
    browser.open(path)
    middle = """(() => { const dot = document.querySelector("circle[data-row='21']");
        dot.scrollIntoView({ block: "center", behavior: "instant" });
        const b = dot.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]; })()"""
    browser.click(*browser.run(middle))
    assert browser.text("tr[aria-current] th").startswith("south_")
    assert browser.text(".picked code").startswith("panorgan view /data/south --case south_")
    assert browser.log == []
