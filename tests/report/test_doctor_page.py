"""The doctor's page: complete, self-contained, true to the checkup; and its pictures, pixel by pixel."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import checkups
import matplotlib.image
import numpy as np
import pytest

from panorgan.anatomy import catalogue
from panorgan.data_doctor import CaseFacts, Checkup, Finding, Severity, Thumbnail
from panorgan.data_doctor.codes import CODES
from panorgan.report import doctor_page
from panorgan.report.doctor_page import render, verdict, write_doctor_page
from panorgan.report.strips import Strip, make_strips
from panorgan.report.thumbnails import UNKNOWN_COLOUR, colour_of, draw, edge_path, png


class Page(HTMLParser):
    """Tags with attributes, text, and the text of each cell of the organ table."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.cells: dict[tuple[str | None, str | None], str] = {}
        self._cell: tuple[str | None, str | None] | None = None
        self._style = False
        self.feed(source)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def all(self, tag: str, kind: str | None = None) -> list[dict[str, str | None]]:
        return [a for name, a in self.tags if name == tag and (kind is None or kind in str(a.get("class")).split())]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self._style = tag == "style"
        self._cell = (found["data-organ"], found["data-place"]) if "data-place" in found else self._cell

    def handle_endtag(self, tag: str) -> None:
        self._style = False
        self._cell = None if tag == "td" else self._cell

    def handle_data(self, data: str) -> None:
        if not self._style:
            self.words.append(data)
            if self._cell:
                self.cells[self._cell] = self.cells.get(self._cell, "") + data


@pytest.fixture(scope="module")
def sick_page() -> Page:
    return Page(render(checkups.sick(), "now"))


# -- the page ------------------------------------------------------------------------------------------------


def test_written_where_asked_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "doctor.html"
    assert write_doctor_page(checkups.healthy(), path) == path
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert list(path.parent.iterdir()) == [path]


def test_page_is_self_contained(sick_page: Page) -> None:
    assert not re.search(r"https?://|//cdn|@import|url\(", sick_page.source)
    for tag, attributes in sick_page.tags:
        assert tag not in ("link", "iframe", "object")
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "srcset", "xlink:href"):
            target = attributes.get(name)
            assert target is None or target.startswith(("data:image/png;base64,", "#"))


def test_links_and_pictures_lead_to_places_in_the_page(sick_page: Page) -> None:
    ids = [str(attributes["id"]) for _, attributes in sick_page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    links = [str(a["href"]).removeprefix("#") for tag, a in sick_page.tags if tag in ("a", "use")]
    assert len(links) > 20
    assert set(links) <= set(ids)


def test_says_that_it_must_stay_in_the_hospital(sick_page: Page) -> None:
    warning = "This page holds slices of scans and case ids. It must stay in the hospital."
    assert sick_page.text.index(warning) < sick_page.text.index("What was read")


def test_every_picture_has_words(sick_page: Page) -> None:
    shown = sick_page.all("svg", "thumb")
    # 12 of 15 and 2 under the findings, 19 of 23 cases in the gallery have one.
    assert len(shown) == 12 + 2 + 19
    assert all("axial slice, Liver, Spleen" in str(a["aria-label"]) for a in shown)
    assert len(sick_page.all("symbol")) == 19, "a picture that is shown twice is stored once"


def test_findings_are_grouped_worst_first_with_meaning_reason_and_fix(sick_page: Page) -> None:
    groups = [(str(a["id"]), str(a["class"])) for a in sick_page.all("article")]
    assert groups == [
        ("finding-shape-mismatch", "finding is-error"),
        ("finding-stray-label", "finding is-error"),
        ("finding-spacing-outlier", "finding is-warning"),
        ("finding-few-patients", "finding is-note"),
    ]
    text = sick_page.text
    assert CODES["shape-mismatch"].meaning in text
    assert text.count("Write corrected copies:") == 2, "a fix that all cases share is shown once"
    for number in range(5, 20):
        assert f"north_{number:03d}" in text
    for words in ("undeclared id 7", "undeclared id 8", "6 mm here, 2.5 mm is usual", "the whole folder"):
        assert words in text
    assert "Pictures of 3 more cases are left out." in text


def test_cases_per_organ_and_site(sick_page: Page) -> None:
    cells = {key: words.strip() for key, words in sick_page.cells.items()}
    assert cells == {
        ("liver", "north"): "19",
        ("spleen", "north"): "191 empty",
        ("kidney", "south"): "3",
    }


def test_healthy_data_gets_a_friendly_page() -> None:
    page = Page(render(checkups.healthy(1), "now"))
    assert "No problem was found in 1 case. The data can be used for training." in page.text
    assert page.all("article") == []
    assert str(Path("/data/north")) in page.text


def test_nothing_could_be_read() -> None:
    checkup = replace(checkups.sick(), cases=(), layouts={})
    page = Page(render(checkup, "now"))
    assert page.all("svg", "thumb") == []
    assert "not recognised" in page.text
    assert "All cases" not in page.text


def test_gallery_is_limited_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_page, "GALLERY", 4)
    page = Page(render(checkups.healthy(6), "now"))
    assert len(page.all("symbol")) == 4
    assert "The first 4 are shown; 2 more cases were checked too." in page.text


def test_hostile_names_are_only_text() -> None:
    name = '"><script>alert(1)</script>'
    healthy = checkups.healthy(1)
    case = replace(healthy.cases[0], case=name, structures=(checkups.structure(name),))
    odd = replace(checkups.sick().findings[0], code=name, case=name, why=name, fix=name)
    page = Page(render(replace(healthy, cases=(case,), findings=(odd,)), "now"))
    assert page.all("script") == [{"type": "application/json", "id": "case-data"}, {}]
    assert name in page.text


@pytest.mark.parametrize(
    ("severities", "sentence"),
    [
        ((), "No problem was found in 5 cases. The data can be used for training."),
        ((2,), "In 5 cases, 1 error must be fixed before training."),
        ((2, 1, 1, 0), "In 5 cases, 1 error must be fixed before training, and 2 warnings should be checked."),
        ((1, 0), "In 5 cases nothing is broken, but 1 warning should be checked before training."),
        ((0, 0), "In 5 cases nothing is wrong; 2 notes for information."),
    ],
)
def test_verdict_in_a_sentence(severities: tuple[int, ...], sentence: str) -> None:
    one = checkups.sick().findings[0]
    findings = tuple(replace(one, severity=Severity(severity)) for severity in severities)
    assert verdict(replace(checkups.healthy(), findings=findings)) == sentence


def test_same_checkup_gives_the_same_bytes() -> None:
    assert render(checkups.sick(), "now") == render(checkups.sick(), "now")


# -- pictures ------------------------------------------------------------------------------------------------


def pixels_of(content: bytes) -> np.ndarray:
    """As matplotlib decodes it; [rows, columns] or [rows, columns, 4], 0–255."""
    return np.rint(matplotlib.image.imread(io.BytesIO(content), format="png") * 255).astype(int)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (40, 60)])
def test_png_keeps_every_grey(shape: tuple[int, int]) -> None:
    grey = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    decoded = pixels_of(png(grey))
    decoded = decoded if decoded.ndim == 2 else decoded[..., 0]
    np.testing.assert_array_equal(decoded, grey)


def test_tint_has_the_colours_of_the_labels_and_is_clear_elsewhere() -> None:
    labels = np.array([[0, 1], [2, 0]], dtype=np.uint8)
    decoded = pixels_of(png(labels, {1: "#d55e00", 2: "#010203"}))
    assert decoded[0, 1, :3].tolist() == [0xD5, 0x5E, 0x00]
    assert decoded[1, 0, :3].tolist() == [1, 2, 3]
    assert decoded[..., 3].tolist() == [[0, 72], [72, 0]]
    assert pixels_of(png(labels, {1: "#d55e00"}))[..., 3].tolist() == [[0, 72], [0, 0]], "a label without a colour"


def test_edges_run_along_the_voxels() -> None:
    mask = np.zeros((3, 4), dtype=bool)
    mask[1, 1:3] = True
    # Two voxels side by side, 2 mm high and 1.5 mm wide: from (1.5, 2) to (4.5, 4).
    assert edge_path(mask, 2.0, 1.5) == "M1.5,2h3M1.5,4h3M1.5,2v2M4.5,2v2"


def test_edges_close_at_the_border_and_round_holes() -> None:
    assert edge_path(np.ones((1, 1), dtype=bool), 1.0, 1.0) == "M0,0h1M0,1h1M0,0v1M1,0v1"
    ring = np.ones((3, 3), dtype=bool)
    ring[1, 1] = False
    assert edge_path(ring, 1.0, 1.0).count("M") == 8
    assert edge_path(np.zeros((2, 2), dtype=bool), 1.0, 1.0) == ""


def test_picture_has_the_right_size_colours_and_side() -> None:
    picture = draw(checkups.thumbnail(0, ("liver", "no_such_organ")))
    assert picture.width_mm == 60 * 5.0
    assert picture.height_mm == 40 * 6.0
    assert picture.sided
    assert [(edge.name, edge.colour) for edge in picture.edges] == [
        ("liver", catalogue()["liver"].colour),
        ("no_such_organ", UNKNOWN_COLOUR),
    ]
    decoded = pixels_of(base64.b64decode(picture.scan.partition(",")[2]))
    np.testing.assert_array_equal(decoded if decoded.ndim == 2 else decoded[..., 0], checkups.thumbnail(0).grey)


def test_picture_without_labels_and_of_a_sagittal_slice() -> None:
    plain = Thumbnail(np.zeros((2, 3), np.uint8), np.zeros((2, 3), np.uint8), ("liver",), "sagittal", (1.0, 1.0))
    picture = draw(plain)
    assert picture.tint == ""
    assert picture.edges == ()
    assert not picture.sided


def test_dark_lines_get_a_light_seam() -> None:
    labels = np.ones((2, 2), dtype=np.uint8)
    dark, light = (
        draw(Thumbnail(labels, labels, (name,), "axial", (1.0, 1.0))).edges[0].dark
        for name in ("liver_tumour", "liver")
    )
    assert (dark, light) == (True, False)
    assert colour_of("liver_tumour") == catalogue()["liver_tumour"].colour


def test_two_sites_may_use_the_same_case_id() -> None:
    north, south = checkups.case("north", 1), checkups.case("south", 1)
    same = replace(south, case=north.case)
    checkup = Checkup(checkups.sick().sources, {}, (north, same), ())
    page = Page(render(checkup, "now"))
    assert len(page.all("symbol")) == 2


# -- strip plots ---------------------------------------------------------------------------------------------


def strips_of(*cases: CaseFacts, findings: tuple[Finding, ...] = ()) -> dict[str, Strip]:
    checkup = replace(checkups.healthy(), cases=cases, findings=findings)
    return {strip.title: strip for strip in make_strips(checkup, str.upper)}


def with_liver(number: int, volume_ml: float) -> CaseFacts:
    liver = replace(checkups.structure("liver", int(volume_ml > 0)), volume_ml=volume_ml)
    return checkups.case("north", number, structures=(liver,), intensity={"median": -100.0 * number})


def test_dots_lie_where_the_values_are() -> None:
    strips = strips_of(*(with_liver(number, 1000.0 + 100 * number) for number in range(3)))
    assert list(strips) == ["Median intensity", "Volume (ml)"], "all voxels are alike: nothing to compare"
    volume = strips["Volume (ml)"]
    assert volume.rows[0].name == "LIVER"
    assert volume.rows[0].colour == catalogue()["liver"].colour
    ticks = {float(text): x for x, text in volume.ticks}
    assert [ticks[1000], ticks[1200]] == [0.0, 1.0]
    assert [dot.x for dot in volume.rows[0].dots] == pytest.approx([0.0, 0.5, 1.0])
    assert volume.rows[0].dots[1].spoken == "north_001: 1100"
    assert "Logarithmic" not in volume.words


def test_rounding_is_not_magnified() -> None:
    assert "Volume (ml)" not in strips_of(*(with_liver(number, 1000.0 + 1e-6 * number) for number in range(3)))


def test_wide_ranges_are_logarithmic_and_empty_masks_left_out() -> None:
    volume = strips_of(*(with_liver(number, ml) for number, ml in enumerate((1.0, 10.0, 100.0, 0.0))))["Volume (ml)"]
    assert [dot.x for dot in volume.rows[0].dots] == pytest.approx([0.0, 0.5, 1.0])
    assert [text for _, text in volume.ticks] == ["1", "10", "100"]
    assert "Logarithmic scale." in volume.words


def test_cases_with_a_warning_are_marked_and_those_with_a_note_are_not() -> None:
    cases = [with_liver(number, 1000.0 + number) for number in range(3)]
    finding = checkups.sick().findings[0]
    found = (
        replace(finding, case="north_000", severity=Severity.warning),
        replace(finding, case="north_001", severity=Severity.note),
    )
    strip = strips_of(*cases, findings=found)["Volume (ml)"]
    assert [dot.marked for dot in strip.rows[0].dots] == [True, False, False]


def test_two_values_are_no_plot() -> None:
    assert strips_of(with_liver(0, 1.0), with_liver(1, 2.0)) == {}
