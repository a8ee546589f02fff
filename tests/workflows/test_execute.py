"""A whole run: its files, that it can be repeated, and what bad input leaves behind (nothing)."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

from panorgan.config import Experiment, parse_experiment
from panorgan.errors import ConfigError, DataError, PanorganError, RunError
from panorgan.federation.events import read_events
from panorgan.workflows.execute import evaluate, train
from panorgan.workflows.model_bundle import load_model
from panorgan.workflows.prepare import prepare
from panorgan.workflows.run import Run
from panorgan.workflows.site_cases import site_settings
from panorgan.workflows.tables import columns, read_metrics


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(tiny(), folder)
    return folder


def test_the_run_folder_holds_what_is_promised(finished, tiny):
    manifest = json.loads((finished / "manifest.json").read_text())
    assert parse_experiment(manifest["experiment"]) == tiny()
    assert manifest["sites"]["north"]["annotated"] == ["liver"]
    assert manifest["sites"]["island"]["external"]
    assert {"torch", "monai", "panorgan", "python"} <= set(manifest["versions"])
    kinds = [event.kind for event in read_events(finished / "events.jsonl") if event.kind != "notice"]
    assert kinds == ["started", "split", "joined", "round", "round", "round", "finished"]
    with (finished / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    promised = "split,site,case,organ,dice,jaccard,hd,hd95,assd,nsd,sensitivity,specificity,rve"
    assert ",".join(rows[0]) == promised == ",".join(columns())
    scored = {("test", "north"), ("test", "south"), ("external", "island")}
    assert {(row["split"], row["site"]) for row in rows} == scored
    card = json.loads((finished / "model" / "model.json").read_text())
    assert card["channels"] == ["background", "liver", "spleen", "kidney_left", "kidney_right"]
    assert card["sites"]["south"]["annotated"] == {"kidney": 2, "spleen": 2}
    assert list((finished / "tensorboard").iterdir())
    assert not (finished / "spool").exists()


def test_every_case_is_scored_with_the_withheld_labels(finished, tiny):
    rows = read_metrics(finished / "metrics.csv")
    prepared = prepare(tiny())
    expected = {(s.name, c.id, organ) for s in prepared.sites for c in s.test for organ in tiny().vocabulary}
    assert {(row["site"], row["case"], row["organ"]) for row in rows} == expected
    assert len(rows) == len(expected)


def test_predictions_lie_on_the_scan_they_belong_to_and_give_the_scores(finished, tiny):
    prepared = prepare(tiny())
    rows = {(row["case"], row["organ"]): row["dice"] for row in read_metrics(finished / "metrics.csv")}
    for site in prepared.sites:
        for case in site.test:
            scan = nib.load(case.image)
            labels = nib.load(finished / "predictions" / site.name / f"{case.id}.nii.gz")
            assert labels.shape == scan.shape
            np.testing.assert_array_equal(labels.affine, scan.affine)
            truth = case.read_masks(case.read_image())["liver"]
            predicted = np.asarray(labels.dataobj) == 1
            dice = 2 * (truth & predicted).sum() / (truth.sum() + predicted.sum())
            assert dice == pytest.approx(rows[case.id, "liver"])


def test_same_seed_twice_gives_the_same_files(finished, tiny, tmp_path):
    train(tiny(), tmp_path / "again")
    for name in ("metrics.csv", "model/model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (finished / name).read_bytes()


def test_evaluate_repeats_the_scores(finished):
    before = (finished / "metrics.csv").read_bytes()
    evaluate(finished)
    assert (finished / "metrics.csv").read_bytes() == before


def test_a_loaded_model_predicts_what_the_run_scored(finished):
    model = load_model(finished, torch.device("cpu"))
    assert model.network.vocabulary.organs == ("liver", "spleen", "kidney_left", "kidney_right")
    assert model.plan.spacing_mm == (12, 12, 12)
    with pytest.raises(RunError) as caught:
        load_model(finished / "predictions", torch.device("cpu"))
    assert caught.value.code == "no-model"


def test_the_models_own_preset_is_applied_to_what_is_scored(tiny, finished, tmp_path):
    """Same weights, other predictions: each organ of each case is at most one piece."""
    from scipy import ndimage

    train(tiny(postprocess="flkd"), tmp_path / "run")
    weights = "model/model.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (finished / weights).read_bytes()
    several = 0
    for path in sorted((tmp_path / "run" / "predictions").rglob("*.nii.gz")):
        plain = finished / "predictions" / path.parent.name / path.name
        for organ in range(1, 5):
            pieces = [
                ndimage.label(np.asarray(nib.load(p).dataobj) == organ, np.ones((3, 3, 3)))[1] for p in (path, plain)
            ]
            assert pieces[0] <= 1
            several += pieces[1] > 1
    assert several, "the plain predictions have nothing to clean"


def test_withheld_labels_never_reach_training(tiny):
    """What a site trains with knows nothing of the organs it does not annotate."""
    prepared = prepare(tiny())
    structures = {site.name: {s for case in site.train for s in case.structures} for site in prepared.training}
    assert structures == {"north": {"liver"}, "south": {"spleen", "kidney"}}
    full = prepare(tiny(method={"name": "central_full"}))
    assert {s for site in full.training for case in site.train for s in case.structures} == set(tiny().vocabulary)


def test_a_finished_run_is_not_trained_again(finished, tiny):
    before = (finished / "events.jsonl").read_bytes()
    result = train(tiny(), finished, resume=True)
    assert result.scores
    assert (finished / "events.jsonl").read_bytes() == before


def test_two_processes_never_share_a_run_folder(tiny, tmp_path, monkeypatch):
    """While one works in the folder, another that resumes it is turned away and changes nothing."""
    from panorgan.methods.base import SiteRule

    original, turned_away = SiteRule.after_round, []

    def meddle(self) -> None:
        original(self)
        before = sorted(p.name for p in (tmp_path / "run").iterdir())
        with pytest.raises(RunError) as caught:
            train(tiny(training={"rounds": 1}), tmp_path / "run", resume=True)
        assert caught.value.code == "run-busy"
        assert sorted(p.name for p in (tmp_path / "run").iterdir()) == before
        turned_away.append(caught.value.fix)

    monkeypatch.setattr(SiteRule, "after_round", meddle)
    train(tiny(training={"rounds": 1}), tmp_path / "run")
    assert len(turned_away) == 2


@pytest.mark.parametrize("site", ["train", "keys", "type"])
def test_a_site_may_have_any_plain_name(tiny, tmp_path, site):
    sites = [{"name": site, "annotated": ["liver"], "cases": 3, "spacing_mm": [12, 12, 12]}]
    experiment = tiny(vocabulary=["liver"], phantom={"sites": sites}, method={"name": "solo"}, training={"rounds": 1})
    assert train(experiment, tmp_path / "run").scores


def test_a_folder_with_a_run_is_not_overwritten(finished, tiny, tmp_path):
    with pytest.raises(RunError) as caught:
        train(tiny(), finished)
    assert caught.value.code == "run-exists"
    assert "--resume" in caught.value.fix
    with pytest.raises(RunError) as caught:
        train(tiny(seed=3), finished, resume=True)
    assert caught.value.code == "other-experiment"
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError) as caught:
        train(tiny(), tmp_path)
    assert caught.value.code == "folder-not-empty"


# -- bad input: one clear message with the fix, nothing half-written ------------------------------------------


@pytest.fixture
def folders(tiny, cache, tmp_path) -> dict[str, Any]:
    """The tiny phantoms as ordinary folders that a test may damage."""
    content: dict[str, Any] = {}
    for name, site in site_settings(tiny(), cache, lambda *_: None).items():
        shutil.copytree(site.folder, tmp_path / name)
        shutil.copytree(site.withheld, tmp_path / "withheld" / name)
        content[name] = {
            "folder": str(tmp_path / name),
            "withheld": str(tmp_path / "withheld" / name),
            "external": site.external,
        }
    return content


def on_folders(tiny_content, sites: dict[str, Any], **changes: Any) -> Experiment:
    content = tiny_content(**changes)
    del content["phantom"]
    return parse_experiment({**content, "sites": sites})


def refuse(
    experiment: Experiment, tmp_path: Path, kind: type[PanorganError], match: str | None = None, code: str = ""
) -> PanorganError:
    folder = tmp_path / "run"
    with pytest.raises(kind, match=match) as caught:
        train(experiment, folder)
    assert code in ("", caught.value.code)
    assert not folder.exists(), "something was written"
    assert caught.value.fix, "no fix is named"
    return caught.value


def test_real_folders_train_like_the_phantom(folders, tiny_content, finished, tmp_path):
    train(on_folders(tiny_content, folders), tmp_path / "run")
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == (finished / "metrics.csv").read_bytes()


def test_one_folder_can_make_several_sites_that_share_no_patient(folders, tiny_content):
    whole = folders["north"]
    sites = {name: {**whole, "part": [i, 2]} for i, name in ((1, "first"), (2, "second"))}
    prepared = prepare(on_folders(tiny_content, sites, vocabulary=["liver"]))
    ids = [{c.id for c in (*s.train, *s.validation, *s.test)} for s in prepared.sites]
    assert len(ids[0]) + len(ids[1]) == 5
    assert not ids[0] & ids[1]


def test_a_folders_own_names_can_be_explained_or_left_out(folders, tiny_content, tmp_path):
    path = Path(folders["south"]["folder"]) / "dataset.json"
    path.write_text(path.read_text().replace('"spleen"', '"Milz"').replace('"kidney"', '"thing"'))
    refuse(on_folders(tiny_content, folders), tmp_path, DataError, "Milz")
    folders["south"] |= {"labels": {"Milz": "spleen"}, "ignore": ["thing"]}
    refuse(on_folders(tiny_content, folders), tmp_path, ConfigError, "No site annotates kidney_left, kidney_right")
    prepared = prepare(
        parse_experiment({**tiny_content(), "phantom": None, "sites": folders, "vocabulary": ["liver", "spleen"]})
    )
    assert {site.name: site.annotated for site in prepared.training} == {"north": ("liver",), "south": ("spleen",)}


def test_a_missing_folder(folders, tiny_content, tmp_path):
    folders["north"]["folder"] += "-gone"
    refuse(on_folders(tiny_content, folders), tmp_path, DataError, "site north", code="folder-missing")


def test_a_missing_label_file(folders, tiny_content, tmp_path):
    next(Path(folders["north"]["folder"]).glob("labelsTr/*")).unlink()
    refuse(on_folders(tiny_content, folders), tmp_path, DataError, "no label file")


def test_a_corrupt_scan(folders, tiny_content, tmp_path):
    for scan in Path(folders["north"]["folder"]).glob("imagesTr/*"):
        scan.write_bytes(scan.read_bytes()[:500])
    error = refuse(on_folders(tiny_content, folders), tmp_path, DataError, code="file-unreadable")
    assert "imagesTr" in error.where


def test_a_corrupt_test_scan_shows_before_training(folders, tiny_content, tmp_path):
    (scan,) = Path(folders["island"]["folder"]).glob("imagesTr/*")
    scan.write_bytes(scan.read_bytes()[:500])
    refuse(on_folders(tiny_content, folders), tmp_path, DataError, code="file-unreadable")


def test_an_empty_folder(folders, tiny_content, tmp_path):
    for scan in Path(folders["north"]["folder"]).glob("imagesTr/*"):
        scan.unlink()
    refuse(on_folders(tiny_content, folders), tmp_path, DataError, "holds no scans")


def test_too_few_patients_for_training(folders, tiny_content, tmp_path):
    scans = sorted(Path(folders["north"]["folder"]).glob("imagesTr/*"))
    for scan in scans[1:]:
        scan.unlink()
    refuse(on_folders(tiny_content, folders), tmp_path, DataError, code="too-few-patients")


def test_a_site_that_annotates_nothing(folders, tiny_content, tmp_path):
    path = Path(folders["north"]["folder"]) / "dataset.json"
    path.write_text(path.read_text().replace('"liver"', '"gallbladder"'))
    refuse(on_folders(tiny_content, folders), tmp_path, ConfigError, code="nothing-annotated")


def test_an_unknown_organ_in_a_folder(folders, tiny_content, tmp_path):
    path = Path(folders["north"]["folder"]) / "dataset.json"
    path.write_text(path.read_text().replace('"liver"', '"livver"'))
    error = refuse(on_folders(tiny_content, folders), tmp_path, DataError, "livver")
    assert "liver" in str(error)


def test_an_organ_that_nobody_annotates(tiny, tmp_path):
    experiment = tiny(vocabulary=["liver", "spleen", "kidney_left", "kidney_right", "pancreas"])
    refuse(experiment, tmp_path, ConfigError, "No site annotates pancreas")


def test_only_external_sites(folders, tiny_content, tmp_path):
    for site in folders.values():
        site["external"] = True
    refuse(on_folders(tiny_content, folders), tmp_path, ConfigError, code="no-training-site")


def test_central_full_without_full_labels(folders, tiny_content, tmp_path):
    del folders["north"]["withheld"]
    experiment = on_folders(tiny_content, folders, method={"name": "central_full"})
    refuse(experiment, tmp_path, ConfigError, code="full-labels-missing")


def test_data_that_changed_under_a_run(folders, tiny_content, tmp_path, monkeypatch):
    from panorgan.methods.base import SiteRule

    experiment = on_folders(tiny_content, folders)
    with monkeypatch.context() as patch:
        patch.setattr(SiteRule, "step", lambda self, batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(experiment, tmp_path / "run")
    for path in Path(folders["north"]["folder"]).glob("labelsTr/*"):
        image = nib.load(path)
        empty = nib.Nifti1Image(np.zeros(image.shape, np.uint8), image.affine)
        nib.save(empty, path)
    with pytest.raises(RunError) as caught:
        train(experiment, tmp_path / "run", resume=True)
    assert caught.value.code == "data-changed"


def test_cuda_asked_for_where_there_is_none(tiny, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    refuse(tiny(hardware={"device": "cuda"}), tmp_path, ConfigError, code="no-cuda")


def test_evaluate_refuses_data_that_changed(folders, tiny_content, tmp_path):
    """Another split would score cases that the model was trained on."""
    train(on_folders(tiny_content, folders, training={"rounds": 1}), tmp_path / "run")
    before = (tmp_path / "run" / "metrics.csv").read_bytes()
    site = Path(folders["north"]["folder"])
    for old in (*site.glob("imagesTr/*"), *site.glob("labelsTr/*"), *(tmp_path / "withheld/north").glob("labelsTr/*")):
        old.with_name("extra_" + old.name).write_bytes(old.read_bytes())
    with pytest.raises(RunError) as caught:
        evaluate(tmp_path / "run")
    assert caught.value.code == "data-changed"
    assert caught.value.fix
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == before


def test_a_run_that_was_split_by_an_older_version_says_so(finished, tiny, tmp_path):
    """Its test cases were others: today's may have been trained on."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    manifest = Run(run).manifest
    del manifest["split_rule"]
    manifest["data_fingerprint"] = "0" * 16
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError) as caught:
        evaluate(run)
    assert caught.value.code == "other-split-rule"


def test_evaluate_says_when_the_manifest_does_not_fit_this_version(finished, tmp_path):
    manifest = Run(finished).manifest
    manifest["experiment"]["training"]["bygone"] = 1
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="bygone") as caught:
        evaluate(tmp_path)
    assert "manifest.json" in caught.value.where


@pytest.mark.parametrize(("select", "chosen", "score"), [("best", 1, 0.8), ("last", 2, None)])
def test_the_card_never_gives_the_score_of_another_round(tiny, tmp_path, monkeypatch, select, chosen, score):
    """Every site scores 0.8 in the first round and less in the second."""
    calls = iter([0.8] * 3 + [0.1] * 3)  # north has one structure, south two; one validation case each
    monkeypatch.setattr("panorgan.federation.validation.dice", lambda predicted, truth: next(calls))
    train(tiny(training={"rounds": 2, "validate_every": 1, "select": select}), tmp_path / "run")
    card = json.loads((tmp_path / "run" / "model" / "model.json").read_text())
    assert (card["round"], card["validation_dice"]) == (chosen, score)


def test_a_finished_run_leaves_no_writer_behind(tiny, tmp_path):
    import threading

    before = threading.active_count()
    train(tiny(training={"rounds": 1, "validate_every": 0}), tmp_path / "run")
    assert threading.active_count() == before
