"""The model card: its numbers are those of the run's files, and nothing else is stated."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from panorgan.evaluation.statistics import organ_site_table
from panorgan.workflows.execute import evaluate, train
from panorgan.workflows.model_card import data_licences, model_card
from panorgan.workflows.run import Run


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory) -> Run:
    return train(tiny(training={"rounds": 1, "validate_every": 0}), tmp_path_factory.mktemp("card") / "run")


def rows(text: str, heading: str) -> dict[str, list[str]]:
    """The table under a heading, by its first column."""
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line.removeprefix("|").removesuffix("|").split("|") for line in section.splitlines() if line[:1] == "|"]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines[2:]}


def test_training_writes_it_with_the_scores_of_the_run(run):
    text = (run.model_folder / "CARD.md").read_text()
    table = organ_site_table(run.scores, "dice")
    found = rows(text, "Results")
    assert set(found) == {"Liver", "Spleen", "Left kidney", "Right kidney"}
    liver = table.organs["liver"]
    assert found["Liver"][:3] == [f"{liver.mean:.2f}", f"{liver.low:.2f} to {liver.high:.2f}", str(liver.n)]
    outside = run.scores.where(split="external", organ="liver").column("dice")
    assert found["Liver"][3] == f"{outside[0]:.2f}"
    assert (found["Liver"][4], found["Liver"][5]) == ("too few cases", "1")
    assert text == model_card(run.card, Run(run.path))


def test_it_says_who_annotated_what_and_how_many_cases(run):
    text = model_card(run.card, run)
    assert rows(text, "Annotated by") == {
        "Liver": ["annotated", "–"],
        "Spleen": ["–", "annotated"],
        "Left kidney": ["–", "annotated"],
        "Right kidney": ["–", "annotated"],
    }
    trained = rows(text, "Trained on")
    assert trained["north"][:3] == ["3", "1 / 1", "3 of 3"]
    assert trained["north"][3] == "12 × 12 × 12"
    assert "Kidneys (2 training cases)" in text


def test_organs_of_low_dice_are_named_and_others_are_not(run):
    limits = model_card(run.card, run).split("## Limits\n")[1].split("\n## ")[0]
    means = {organ: summary.mean for organ, summary in organ_site_table(run.scores, "dice").organs.items()}
    (line,) = [line for line in limits.splitlines() if "below 0.7" in line]
    named = re.findall(r"\((\d\.\d\d)\)", line)
    assert sorted(named) == sorted(f"{mean:.2f}" for mean in means.values() if mean < 0.7)
    assert named


def test_what_was_not_scored_is_said(run, tmp_path):
    folder = Path(shutil.copytree(run.path, tmp_path / "run"))
    evaluate(folder)
    scores = [row for row in Run(folder).scores if row["split"] == "test" and row["organ"] != "spleen"]

    class Fewer(Run):
        scores = property(lambda self: kept)

    kept = type(run.scores)(scores)
    limits = model_card(run.card, Fewer(folder)).split("## Limits\n")[1]
    assert "Not scored in the federation: Spleen." in limits
    assert "Nothing was scored at external sites." in limits


def test_a_model_alone_states_no_scores(run):
    text = model_card(run.card)
    assert "| Dice" not in text
    assert "Not scored here" in text
    assert rows(text, "Trained on")["north"] == ["3", "–", "–", "–"]


def test_names_from_elsewhere_stay_text(run):
    card = {**run.card, "name": "a\n# <b>|`x`", "parameters": "many", "round": None}
    first, *rest = model_card(card).splitlines()
    assert first == r"# a␊\# \<b\>\|\`x\`"
    assert "# <b>" not in "\n".join(rest)


def test_the_licence_is_what_lies_beside_the_data(tmp_path):
    stated, fetched, silent = (tmp_path / name for name in ("stated", "fetched", "silent"))
    for folder in (stated, fetched, silent):
        folder.mkdir()
    (stated / "dataset.json").write_text(json.dumps({"licence": "CC-BY-SA 4.0"}))
    (tmp_path / "fetched.licence.txt").write_text("Name: x\nLicence:  CC0: https://example.org\n")

    class Known:
        manifest = {  # noqa: RUF012
            "experiment": {"sites": {p.name: {"folder": str(p)} for p in (stated, fetched, silent, tmp_path / "gone")}}
        }

    assert data_licences(Known()) == {
        "stated": "CC-BY-SA 4.0",
        "fetched": "CC0: https://example.org",
        "silent": "not stated",
        "gone": "not stated",
    }


def test_what_was_not_measured_is_said_and_a_standardised_plan_has_no_window(run):
    card = {**run.card, "plan": {**run.card["plan"], "intensity": "zscore"}, "input_channels": ["t1", "flair"]}
    planned = Run(run.path)
    planned.__dict__["manifest"] = {**run.manifest, "statistics": {}}  # as after `plan --write-to`
    text = model_card(card, planned)
    assert "t1, flair" in text
    assert "window_hu" not in text
    assert rows(text, "Trained on")["north"][2:] == ["not measured", "not measured"]
    usual = model_card(run.card, run)
    assert "window_hu" in usual
    assert "Channels of a scan" not in usual
    assert "measured nothing" in text
    assert "measured nothing" not in usual
    for heading in ("Trained on", "Annotated by", "Results"):
        assert "" not in [cell for line in rows(usual, heading).values() for cell in line]
