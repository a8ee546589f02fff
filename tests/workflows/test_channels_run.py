"""Federations with four channels per scan: the experiment file, whole runs of every method, and prediction."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from channel_folders import SEQUENCES, write_sequences
from fediod_pieces import SMALL as NARROW
from invoking import invoke
from refusing import refused

from panorgan.agreement import Agreement
from panorgan.config import load_experiment, parse_experiment
from panorgan.data.volume import Volume
from panorgan.errors import ConfigError
from panorgan.methods.protocol import SiteInfo
from panorgan.methods.registry import methods
from panorgan.networks import UNetSettings
from panorgan.preparation.plan import Plan
from panorgan.report.page import write_report
from panorgan.workflows.doctor import doctor
from panorgan.workflows.execute import train
from panorgan.workflows.input_doubts import doubts_about
from panorgan.workflows.machine_size import Data, propose
from panorgan.workflows.model_bundle import Model, load_model
from panorgan.workflows.prepare import prepare
from panorgan.workflows.scans_to_segment import find_scans
from panorgan.workflows.site_cases import cache_folder, site_settings
from panorgan.workflows.starting_model import check_start, other_channels

EXAMPLES = Path(__file__).parents[2] / "examples"
LAYOUTS = {"north": "nnunet", "south": "msd", "island": "csv"}
DECATHLON = {"T1w": "t1", "t1gd": "t1ce", "T2w": "t2"}
ONE_ROUND = {"rounds": 1, "validate_every": 1}
AXIAL = {"rounds": 2, "validate_every": 1, "sampling": {"patch_size": [16, 16, 1], "batch_size": 4}}


@pytest.fixture(scope="module")
def sites(tiny, tmp_path_factory) -> dict:
    """The tiny hospitals with four sequences per case, each in another layout."""
    folder = tmp_path_factory.mktemp("sequences")
    found = {}
    for name, site in site_settings(tiny(), cache_folder(), lambda what, done, total: None).items():
        content = site.as_json()
        content["folder"] = str(write_sequences(site.folder, folder / name, LAYOUTS[name]))
        found[name] = content | ({"channels": DECATHLON} if LAYOUTS[name] == "msd" else {})
    return found


@pytest.fixture(scope="module")
def sequences(tiny_content, sites):
    """The tiny experiment on them, with changes."""

    def make(**changes):
        content = tiny_content(**changes)
        del content["phantom"]
        content["plan"] = {"spacing_mm": [12, 12, 12]}
        return parse_experiment({**content, "channels": list(SEQUENCES), "sites": sites})

    return make


@pytest.fixture(scope="module")
def model_run(sequences, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("four") / "run"
    train(sequences(training=ONE_ROUND), folder)
    return folder


# -- the experiment file


def test_channels_decide_the_network_and_the_intensities(sequences):
    experiment = sequences()
    assert experiment.network.input_channels == 4
    assert experiment.plan.intensity == "zscore"
    assert parse_experiment(experiment.as_json()) == experiment
    assert Agreement(**experiment.agreement().as_json()).fingerprint() == experiment.agreement().fingerprint()
    assert experiment.with_method("solo").channels == SEQUENCES


def test_one_channel_is_written_and_counted_as_ever(tiny):
    experiment = tiny()
    content = experiment.as_json()
    assert "channels" not in content
    assert "input_channels" not in content["network"]
    assert all("channels" not in site for site in content["sites"].values())
    assert UNetSettings().as_json().keys() & {"input_channels"} == set()


def test_a_single_channel_that_is_named_may_be_windowed(tiny_content):
    content = tiny_content(channels=["CT"])
    assert parse_experiment(content).plan.window_hu == (-160, 240)
    assert parse_experiment(content).network.input_channels == 1


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"channels": ["t1", "T-1"]}, "channel-named-twice"),
        ({"channels": ["t1", "../t2"]}, "bad-channel-name"),
        ({"channels": ["t1", "t2"], "plan": {"intensity": "window"}}, "window-of-channels"),
        ({"channels": ["t1", "t2"], "network": {"input_channels": 3}}, "input-channels-differ"),
        ({"network": {"input_channels": 2}}, "input-channels-differ"),
    ],
)
def test_settings_that_contradict_are_refused(tiny_content, changes, code):
    with refused(code):
        parse_experiment(tiny_content(**changes))


def test_channels_change_the_fingerprint(tiny_content):
    fingerprints = {parse_experiment(tiny_content(**c)).fingerprint() for c in ({}, {"channels": ["CT"]})}
    assert len(fingerprints) == 2


def test_the_command_line_names_channels(tiny_content, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(tiny_content()))
    assert load_experiment(path, ["channels=[a, b]"]).network.input_channels == 2


# -- whole runs


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(methods()))
@pytest.mark.parametrize("slices", [False, True], ids=["3d", "2d"])
def test_every_method_trains_on_four_channels(sequences, tmp_path, method, slices):
    """Every test case has a prediction on exactly its own grid, and the delivered model makes it again."""
    shape = {"dimensions": 2} if slices else {}
    training = AXIAL if slices else ONE_ROUND
    narrow = NARROW if method == "fediod" else {}
    features = {} if method == "fediod" else {"features": [4, 8]}
    experiment = sequences(training=training, method={"name": method, **narrow}, network=shape | features)
    result = train(experiment, tmp_path / "run")
    assert {row["organ"] for row in result.scores} == set(experiment.vocabulary)
    model = load_model(result, "cpu")
    assert model.card["inference"]["patch_size"] == list(experiment.training.sampling.patch_size)
    for site in prepare(experiment).sites:
        for case in site.test:
            written = nib.load(result.predictions_folder / site.name / f"{case.id}.nii.gz")
            volume = case.read_image()
            np.testing.assert_allclose(written.affine, volume.affine, atol=1e-4)
            np.testing.assert_array_equal(np.asarray(written.dataobj), model.label_map(volume))
    if method in ("fedavg", "fediod"):
        assert write_report(result).stat().st_size > 10_000


def test_every_channel_counts(sequences, model_run):
    case = next(site for site in prepare(sequences()).sites if site.name == "north").test[0]
    volume, model = case.read_image(), load_model(model_run, "cpu")
    found = []
    for number in range(4):
        channels = [v if n != number else np.roll(v, 3, axis=0) for n, v in enumerate(volume.channels)]
        changed = Volume(channels[0], volume.affine, tuple(channels[1:]))
        found.append(model.network(_prepared(changed, model)).detach())
    assert not any(torch.equal(a, b) for n, a in enumerate(found) for b in found[:n])


def _prepared(volume: Volume, model: Model) -> torch.Tensor:
    from panorgan.preparation.preprocess import prepare_image

    return prepare_image(volume, model.plan)[None, :, :16, :16, :16]


def test_the_doctor_reads_every_channel_of_an_experiment(sequences, sites):
    checkup = doctor(sequences(), workers=1)
    assert {f.code for f in checkup.findings if f.severity > 0} <= {"few-patients", "tiny-mask", "huge-mask"}, [
        f"{f.code} {f.case} {f.what} {f.why}" for f in checkup.findings
    ]
    resampled = [f for f in checkup.findings if f.code == "channel-resampled"]
    assert {(f.site, f.what.split(":")[0]) for f in resampled} == {("island", "Channel flair")}


# -- prediction


def test_the_model_says_which_channels_it_wants(model_run):
    assert load_model(model_run, "cpu").channels == SEQUENCES
    assert json.loads((model_run / "model" / "model.json").read_text())["input_channels"] == list(SEQUENCES)


def test_all_ways_to_give_a_scan_give_the_same_labels(model_run, sites, tmp_path):
    model = load_model(model_run, "cpu")
    images = Path(sites["north"]["folder"]) / "imagesTr"
    case = sorted(images.iterdir())[0].name.removesuffix("_0000.nii.gz")
    files = [images / f"{case}_{number:04d}.nii.gz" for number in range(4)]
    voxels = np.stack([nib.load(path).get_fdata(dtype=np.float32) for path in files])
    affine = nib.load(files[0]).affine
    nib.save(nib.Nifti1Image(np.moveaxis(voxels, 0, -1), affine), tmp_path / "whole.nii.gz")
    wanted = model.predict(voxels, affine).labels
    for scan in (files, dict(zip(reversed(SEQUENCES), reversed(files), strict=True)), tmp_path / "whole.nii.gz"):
        np.testing.assert_array_equal(model.predict(scan).labels, wanted)
    with refused("channels-differ"):
        model.predict(voxels[0], affine)
    with refused("channels-differ"):
        model.predict(voxels[:3], affine)
    with refused("channels-differ"):
        model.predict(files[:3])
    with refused("channel-missing"):
        model.predict({"t1": files[0]})
    with refused("unknown-channel"):
        model.predict({**dict(zip(SEQUENCES, files, strict=True)), "adc": files[0]})


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        nib.save(nib.Nifti1Image(np.zeros((4, 4, 4), np.uint8), np.eye(4)), folder / name)
    return folder


def found(*paths: Path) -> dict[str, list[str]]:
    scans = find_scans(paths, (), SEQUENCES).scans
    return {scan.name: [channel.path.name for channel in scan.channels] for scan in scans}


def test_files_of_a_folder_are_grouped_by_their_names(tmp_path):
    numbered = touch(tmp_path / "n", *(f"{case}_{i:04d}.nii.gz" for case in ("a", "b") for i in range(4)))
    assert found(numbered) == {case: [f"{case}_{i:04d}.nii.gz" for i in range(4)] for case in ("a", "b")}
    files = [f"BraTS_001_{name}.nii.gz" for name in SEQUENCES]
    brats = touch(tmp_path / "brats", *files, "BraTS_001_seg.nii.gz")
    assert found(brats) == {"BraTS_001": files}
    assert find_scans([brats], (), SEQUENCES).left_out == {brats: {"files of no channel": 1}}
    plain = touch(tmp_path / "anna", *(f"{name.upper()}.nii.gz" for name in SEQUENCES))
    assert found(plain) == {"anna": [f"{name.upper()}.nii.gz" for name in SEQUENCES]}
    assert found(*sorted(brats.glob("*_[tf]*"))) == {"BraTS_001": files}


def test_a_model_of_one_named_channel_takes_that_of_a_folder(tmp_path):
    brats = touch(tmp_path / "brats", *(f"BraTS_001_{name}.nii.gz" for name in SEQUENCES))
    scans = find_scans([brats], (), ("flair",))
    assert [scan.path.name for scan in scans.scans] == ["BraTS_001_flair.nii.gz"]
    assert scans.left_out == {brats: {"files of no channel": 3}}
    plain = touch(tmp_path / "plain", "a.nii.gz", "b.nii.gz")
    assert [scan.name for scan in find_scans([plain], (), ("flair",)).scans] == ["a", "b"]


def test_files_are_named_one_by_one(tmp_path):
    folder = touch(tmp_path / "x", "w.nii.gz", "x.nii.gz", "y.nii.gz", "z.nii.gz")
    pairs = [Path(f"{name}={folder / file}.nii.gz") for name, file in zip(SEQUENCES, "zyxw", strict=True)]
    assert found(*pairs) == {"z": ["z.nii.gz", "y.nii.gz", "x.nii.gz", "w.nii.gz"]}
    with refused("image-missing"):  # before a model is loaded
        found(pairs[0].with_name("missing.nii.gz"), *pairs[1:])


def test_a_scan_given_channel_by_channel_is_named_after_its_case(tmp_path):
    for case in ("anna", "ben"):  # else the second patient would overwrite the first
        own = touch(tmp_path / case, *(f"{name}.nii.gz" for name in SEQUENCES))
        assert set(found(*(Path(f"{name}={own / name}.nii.gz") for name in SEQUENCES))) == {case}
    flat = touch(tmp_path / "flat", *(f"cara_{name}.nii.gz" for name in SEQUENCES))
    assert set(found(*(Path(f"{name}={flat / f'cara_{name}.nii.gz'}") for name in SEQUENCES))) == {"cara"}


def test_what_cannot_be_grouped_is_refused(tmp_path):
    with refused("channel-missing") as caught:
        found(touch(tmp_path / "a", "anna_t1.nii.gz", "anna_t2.nii.gz", "anna_flair.nii.gz"))
    assert "anna" in caught.value.what
    assert "t1ce" in caught.value.what
    with refused("channel-unclear"):
        found(touch(tmp_path / "b", "scan.nii.gz") / "scan.nii.gz")
    with refused("channel-unclear"):
        found(touch(tmp_path / "b", "scan.nii.gz"))
    with refused("channel-file-twice"):
        found(touch(tmp_path / "c", "anna_t1.nii.gz", "anna_T1.nii"))
    with refused("channel-missing"):
        found(Path(f"t1={tmp_path / 'b' / 'scan.nii.gz'}"))
    with refused("channel-file-twice"):
        found(*(Path(f"t1={tmp_path / 'c' / name}") for name in ("anna_t1.nii.gz", "anna_T1.nii")))
    with refused("no-scans"):
        found(touch(tmp_path / "empty"))


def test_time_and_memory_are_those_of_all_channels(sequences, tmp_path):
    experiment, heard = sequences(training=ONE_ROUND), []
    train(experiment, tmp_path / "run", listeners=[heard.append], estimate=True)
    (estimate,) = [event.facts for event in heard if event.kind == "estimate"]
    assert estimate["seconds"] > 0
    facts = {"north": SiteInfo("north", 4, {"liver": 4}), "south": SiteInfo("south", 3, {"spleen": 3})}
    data = Data((30.0, 26.0, 18.0), (12.0, 12.0, 12.0), facts, 2, 2)
    assert propose(experiment, lambda name: True, data, torch.device("cpu"), 480.0, 64e9).estimate.seconds > 0


def test_predict_takes_the_files_of_a_case(model_run, sites, tmp_path, capfd, monkeypatch):
    images = Path(sites["north"]["folder"]) / "imagesTr"
    case = sorted(images.iterdir())[0].name.removesuffix("_0000.nii.gz")
    files = [str(images / f"{case}_{number:04d}.nii.gz") for number in range(4)]
    arguments = ("predict", str(model_run), *files, "--out", str(tmp_path / "labels"), "--json")
    code, out, _ = invoke(capfd, monkeypatch, *arguments)
    assert code == 0
    shown = json.loads(out)
    assert shown["channels"] == dict(zip(SEQUENCES, files, strict=True))
    assert (tmp_path / "labels" / f"{case}.nii.gz").is_file()
    assert nib.load(shown["labels"]).shape == nib.load(files[0]).shape
    code, _, err = invoke(capfd, monkeypatch, "predict", str(model_run), files[0], "--out", str(tmp_path / "o"))
    assert code == 2
    assert "[channel-missing]" in err


def test_a_doubt_names_its_channel():
    random = np.random.default_rng(0).normal(100, 20, (20, 20, 20)).clip(0)
    plan = Plan(intensity="zscore")
    odd = Volume(random, np.eye(4), (np.zeros_like(random), random * 10 - 1000))
    doubts = doubts_about(odd, plan, None, "", ("t1", "t2", "flair"))
    assert [(doubt.code, doubt.what.split(":")[0]) for doubt in doubts] == [("constant-image", "Channel t2")]
    fine = Volume(random, np.eye(4), (random[::-1],))
    assert doubts_about(fine, plan, None, "", ("t1", "t2")) == ()


# -- the example


def test_the_example_trains_on_a_folder_like_the_decathlons(sites, tmp_path, monkeypatch):
    """The set itself is 7 GB; its dataset.json names sequences and labels like this."""
    monkeypatch.setenv("PANORGAN_DATA", str(tmp_path))
    folder = write_sequences(_labelled_like_brats(tmp_path / "source"), tmp_path / "Task01_BrainTumour", "msd")
    assert json.loads((folder / "dataset.json").read_text())["modality"]["2"] == "t1gd"
    fast = ["network.features=[4, 4]", "training.rounds=1", "training.local_steps=1", "training.overlap=0"]
    fast += ["training.sampling.patch_size=[8, 8, 8]", "training.sampling.batch_size=1"]
    experiment = load_experiment(EXAMPLES / "brain_tumour.yaml", fast)
    run = train(experiment, tmp_path / "run")
    assert {row["organ"] for row in run.scores} == set(experiment.vocabulary)
    assert load_model(run, "cpu").channels == SEQUENCES


def _labelled_like_brats(folder: Path) -> Path:
    random = np.random.default_rng(0)
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    for number in range(10):
        labels = np.zeros((16, 16, 16), np.uint8)
        labels[4:12, 4:12, 4:12], labels[6:10, 6:10, 6:10], labels[7:9, 7:9, 7:9] = 1, 2, 3
        scan = (random.normal(0, 5, labels.shape) + 40 * labels + 10).astype(np.float32)
        nib.save(nib.Nifti1Image(scan, np.eye(4)), folder / "imagesTr" / f"BRATS_{number:03d}_0000.nii.gz")
        nib.save(nib.Nifti1Image(labels, np.eye(4)), folder / "labelsTr" / f"BRATS_{number:03d}.nii.gz")
    labels = {"background": 0, "edema": 1, "non-enhancing tumor": 2, "enhancing tumour": 3}
    (folder / "dataset.json").write_text(json.dumps({"labels": labels}))
    return folder


def test_a_channel_at_another_place_is_refused(sequences, model_run):
    """The first layer would read it as another."""
    swapped = [SEQUENCES[1], SEQUENCES[0], *SEQUENCES[2:]]
    start = sequences(training={**ONE_ROUND, "start_from": str(model_run)})
    check_start(start)
    moved = start.model_copy(update={"channels": tuple(swapped)})
    with refused("start-channel-order", ConfigError):
        check_start(moved)


def test_channels_of_other_names_are_reported(sequences, model_run):
    start = sequences(training={**ONE_ROUND, "start_from": str(model_run)})
    assert other_channels(start) == ""
    spelled = start.model_copy(update={"channels": (SEQUENCES[0].upper(), *SEQUENCES[1:])})
    assert other_channels(spelled) == ""
    renamed = start.model_copy(update={"channels": ("adc", *SEQUENCES[1:])})
    check_start(renamed)
    assert f"adc here is {SEQUENCES[0]} there" in other_channels(renamed)
