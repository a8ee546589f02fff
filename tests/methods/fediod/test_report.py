"""The section on attention: what it shows of a run on slices, its colours, and the shares of sites in heads."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil

import numpy as np
import pytest
import torch
from fediod_pieces import FEDIOD, SLICES
from PIL import Image

from panorgan.methods.fediod import report as attention
from panorgan.methods.fediod.head_attribution import head_weights
from panorgan.methods.fediod.report import choose_cases, head_table, heat_gradient, heat_rgba, scale_top
from panorgan.report.page import write_report
from panorgan.workflows.execute import train
from panorgan.workflows.run import Run
from panorgan.workflows.tables import Table


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory) -> Run:
    folder = Run(tmp_path_factory.mktemp("attention") / "run")
    training = {"rounds": 2, "local_steps": 1, "validate_every": 0, **SLICES["training"]}
    train(tiny(method=FEDIOD, network=SLICES["network"], training=training, local_models=True), folder.path)
    return folder


@pytest.fixture(scope="module")
def page(run) -> str:
    return write_report(run.path).read_text(encoding="utf-8")


def section(page: str) -> str:
    start = page.index('<section id="attention"')
    return page[start : page.index("</section>", start)]


def decoded(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


# -- the page ----------------------------------------------------------------------------------------------------------


def test_every_site_and_every_model_is_shown(page):
    text = section(page)
    assert '<a href="#attention">' in page
    cases = re.findall(r"<h3>(\w+) · (\w+)", text)
    assert {site for site, _ in cases} == {"north", "south", "island"}
    models = re.findall(r'<tr><th scope="row">([^<]+)<span class="sub">([^<]*)', text)
    of_a_slice = [
        ("Global model", "delivered"),
        ("north", "labels Liver"),
        ("south", "labels Spleen, Left kidney, Right kidney"),
    ]
    assert models == of_a_slice * len(cases)


def test_the_pictures_of_single_sites_are_folded(page):
    """The global model's are there at once, those of the sites below a line that names them."""
    folded = re.findall(r"<details.*?</details>", section(page), re.DOTALL)
    assert len(folded) == len(re.findall(r"<h3>\w+ · \w+", section(page)))
    for each in folded:
        assert "<summary>The same slice seen by the sites’ own models: north, south</summary>" in each
        assert set(re.findall(r'<tr><th scope="row">([^<]+)<', each)) == {"north", "south"}
    rest = re.sub(r"<details.*?</details>", "", section(page), flags=re.DOTALL)
    assert set(re.findall(r'<tr><th scope="row">([^<]+)<span', rest)) == {"Global model"}


def test_every_picture_has_words_a_scan_and_a_map_of_its_own(page):
    text = section(page)
    pictures = re.findall(r"<svg viewBox.*?</svg>", text, re.DOTALL)
    words = [re.search(r'aria-label="([^"]*)"', picture)[1] for picture in pictures]
    assert len(set(words)) == len(words), "each tells model, case and organ"
    assert all(re.search(r"at most \d+\.\d times the average", each) for each in words)
    scans = set(re.findall(r'<g id="([^"]*)"', text))
    assert {re.search(r'<use href="#([^"]*)"', picture)[1] for picture in pictures} == scans
    maps = [decoded(re.search(r'href="(data:image/png[^"]*)"', picture)[1]) for picture in pictures]
    assert {found.shape for found in maps} == {(16, 16, 4)}, "4 × 4 tokens, four points each"
    received = [each for each in words if "attention received" in each]
    assert 0 < len(received) < len(words)


def test_without_scans_the_page_says_so(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    manifest = Run(copy).manifest
    content = manifest["experiment"]
    content["phantom"] = None
    content["sites"] = {"north": {"folder": str(tmp_path / "gone"), "annotated": ["liver"]}}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    text = section(write_report(copy).read_text(encoding="utf-8"))
    assert "The scans of this run cannot be shown" in text
    assert "Which site counts in which head" in text
    assert "data:image" not in text
    assert str(tmp_path) not in text


def test_models_without_attention_have_no_section(tiny, tmp_path):
    train(tiny(training={"rounds": 1, "local_steps": 1, "validate_every": 0}), tmp_path / "run")
    assert "found by" not in write_report(tmp_path / "run").read_text(encoding="utf-8")


def test_without_local_models_there_is_the_global_one(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    shutil.rmtree(copy / "local_models")
    text = section(write_report(copy).read_text(encoding="utf-8"))
    assert set(re.findall(r'<tr><th scope="row">([^<]+)<span', text)) == {"Global model"}
    assert "<details" not in text
    assert "local_models: true" in text


def test_a_network_of_volumes_is_shown_on_axial_slices(tiny, tmp_path):
    train(tiny(method=FEDIOD, training={"rounds": 1, "local_steps": 1, "validate_every": 0}), tmp_path / "run")
    text = section(write_report(tmp_path / "run").read_text(encoding="utf-8"))
    assert "A map has 4 × 4 × 4 places" in re.sub(r"\s+", " ", text)
    assert {decoded(uri).shape for uri in re.findall(r'href="(data:image/png[^"]*)"', text)} == {(16, 16, 4)}


def test_of_a_site_the_median_and_the_worst_case(run, monkeypatch):
    changed = Run(run.path)
    dice = {"a": 0.9, "b": 0.5, "c": 0.7}
    changed.scores = Table(
        {"site": site, "case": case, "organ": organ, "dice": value + change}
        for site in ("north", "south")
        for case, value in dice.items()
        for organ, change in (("liver", 0.1), ("spleen", -0.1))
    )
    assert choose_cases(changed) == [("north", "c"), ("north", "b"), ("south", "c"), ("south", "b")]
    monkeypatch.setattr(attention, "_MOST_CASES", 2)
    # One each, of two sites at most, and the external one (which has no scores here) comes first.
    assert choose_cases(changed) == [("north", "c")]


# -- colours -----------------------------------------------------------------------------------------------------------


def test_colours_by_doublings_and_clear_up_to_the_average():
    rgba = heat_rgba(np.array([[0.0, 1.0, 2.0, 4.0, 8.0, 99.0]]), 8)[0]
    assert rgba[:2, 3].tolist() == [0, 0], "up to the average the scan stays as it is"
    # Half of the scale is reached at √8, from where on the scan shines through by a fifth.
    assert rgba[2, 3] == round(0.8 * 255 * 2 / 3)
    assert rgba[3:, 3].tolist() == [204] * 3
    assert rgba[4].tolist() == rgba[5].tolist()


def test_colours_grow_lighter_for_every_eye():
    """Lightness alone tells the order, so that no kind of colour vision loses it."""
    rgba = heat_rgba(2.0 ** np.linspace(0.05, 3, 40)[None], 8)[0].astype(float)
    lightness = rgba[:, :3] @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(lightness) >= -0.5).all()
    assert lightness[-1] - lightness[0] > 120
    assert heat_gradient().count("rgba(") == 9


@pytest.mark.parametrize(("most", "top"), [(1.0, 2), (1.9, 2), (2.0, 2), (2.1, 4), (100.0, 128)])
def test_the_scale_ends_at_a_power_of_two(most, top):
    assert scale_top([torch.tensor([0.1, most])]) == top


# -- heads -------------------------------------------------------------------------------------------------------------


def test_head_shares_are_those_of_the_delivered_round(run):
    record = Run(run.path)
    table = head_table(record)
    assert table is not None
    assert (table.round, table.heads, table.even) == (2, (3, 3), "50")
    rounds = [json.loads(line) for line in run.events_file.read_text().splitlines()]
    reported = next(facts["sites"] for facts in rounds if facts["event"] == "round" and facts["number"] == 2)
    importance = {
        site: {k: v for k, v in own.items() if k.startswith("attribution/")} for site, own in reported.items()
    }
    cases = {site.name: float(site.cases["train"]) for site in record.training_sites}
    expected = head_weights(importance, cases)
    shown = {site: [cell.text for layer in layers for cell in layer] for site, layers in table.rows}
    order = [f"attribution/{layer}.{head}" for layer in range(2) for head in range(3)]
    for site, texts in shown.items():
        assert texts == [f"{100 * expected[name][site]:.0f}" if expected[name][site] else "–" for name in order]


def test_head_shares_by_hand(run, tmp_path):
    """Layer 0: 3 to 1; layer 1: nothing at north. North sent nothing in round 2, so round 1 counts for it."""
    lines = [
        {"number": 1, "sites": {"north": {"attribution/0.0": 3.0, "attribution/1.0": -2.0}, "south": {}}},
        {"number": 2, "sites": {"north": {"loss": 1.0}, "south": {"attribution/0.0": 1.0, "attribution/1.0": 5.0}}},
        {"number": 3, "sites": {"north": {"attribution/0.0": 0.0}}},
    ]
    copy = Run(shutil.copytree(run.path, tmp_path / "copy"))
    assert copy.delivered_round == 2
    texts = [json.dumps({"time": 0, "event": "round", **line}) for line in lines]
    copy.events_file.write_text("\n".join(texts) + "\n")
    table = head_table(copy)
    assert table is not None
    assert table.heads == (1, 1)
    assert [(site, [cell.text for layer in layers for cell in layer]) for site, layers in table.rows] == [
        ("north", ["75", "–"]),
        ("south", ["25", "100"]),
    ]
    # 75 % of two sites is three quarters of the way to twice an even share; nothing is white.
    cell = table.rows[0][1][0][0]
    assert cell.colour == "#" + "".join(f"{round(255 + (b - 255) * 0.75):02x}" for b in (112, 172, 205))
    assert table.rows[0][1][1][0].colour == "#ffffff"
    assert cell.spoken == "north, layer 1, head 1: counts for 75 percent"


def test_without_attribution_there_is_no_table(run, tmp_path):
    quiet = Run(shutil.copytree(run.path, tmp_path / "copy"))
    quiet.events_file.unlink()
    assert head_table(quiet) is None
