"""The example experiments that need more than a glance: made cases, and sites that share a data set."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import nibabel as nib
import numpy as np
import pytest

from panorgan.anatomy import Vocabulary
from panorgan.config import Experiment, load_experiment
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.workflows.compare_entries import parse_methods
from panorgan.workflows.execute import train
from panorgan.workflows.prepare import prepare

EXAMPLES = Path(__file__).parent.parent / "examples"
DATA = Path(__file__).parents[2] / "shared" / "data"
FAST = ["training.rounds=2", "training.local_steps=1", "training.validate_every=2", "network.features=[4, 4, 8]"]


def smoke_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smoke", EXAMPLES / "make_totalsegmentator_smoke.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def smoke_experiment(folder: Path, *overrides: str) -> Experiment:
    places = [f"sites.{site}.{key}={folder}" for site in ("upper", "lower") for key in ("folder", "withheld")]
    return load_experiment(EXAMPLES / "totalsegmentator.yaml", [*places, *overrides])


def write_scan(folder: Path) -> tuple[Path, Path]:
    """Four boxes as organs, in a scan with an affine of its own; voxel values say where they come from."""
    affine = np.array([[-3.0, 0, 0, 80], [0, 3, 0, -20], [0, 0, 3, 5], [0, 0, 0, 1]])
    labels = np.zeros((60, 50, 40), dtype=np.uint8)
    for index, start in ((5, 12), (1, 22), (2, 32), (3, 42)):
        labels[start : start + 8, 15:35, 14:30] = index
    voxels = np.arange(labels.size, dtype=np.int32).reshape(labels.shape) % 30000
    nib.save(nib.Nifti1Image(voxels, affine), folder / "ct.nii.gz")
    nib.save(nib.Nifti1Image(labels, affine), folder / "labels.nii.gz")
    return folder / "ct.nii.gz", folder / "labels.nii.gz"


def test_smoke_cases_are_crops_that_stay_where_they_were(tmp_path):
    ct, labels = write_scan(tmp_path)
    folders = smoke_script().write_cases(ct, labels, tmp_path / "cases")
    assert [folder.name for folder in folders] == [f"s{number:04d}" for number in range(1, 9)]
    whole, classes = nib.load(ct), np.asarray(nib.load(labels).dataobj)
    starts = set()
    for folder in folders:
        crop = nib.load(folder / "ct.nii.gz")
        start = np.linalg.inv(whole.affine) @ crop.affine[:, 3]
        window = tuple(slice(round(a), round(a) + n) for a, n in zip(start[:3], crop.shape, strict=True))
        starts.add(tuple(part.start for part in window))
        np.testing.assert_array_equal(np.asarray(crop.dataobj), np.asarray(whole.dataobj)[window])
        for organ, index in (("liver", 5), ("spleen", 1), ("kidney_right", 2), ("kidney_left", 3)):
            mask = np.asarray(nib.load(folder / "segmentations" / f"{organ}.nii.gz").dataobj)
            np.testing.assert_array_equal(mask, classes[window] == index)
            assert mask.any()
    assert len(starts) == 8


def test_smoke_cases_need_labels_on_the_scans_grid(tmp_path):
    ct, labels = write_scan(tmp_path)
    nib.save(nib.Nifti1Image(np.asarray(nib.load(labels).dataobj), np.eye(4)), labels)
    with pytest.raises(SystemExit, match="not on the grid"):
        smoke_script().write_cases(ct, labels, tmp_path / "cases")


@pytest.mark.skipif(not (DATA / "totalsegmentator_examples").is_dir(), reason="the real scan is not in ../shared/data")
def test_the_totalsegmentator_smoke_federation_runs(tmp_path):
    source = DATA / "totalsegmentator_examples"
    smoke_script().write_cases(
        source / "example_ct.nii.gz", source / "example_seg_fast_force_split.nii.gz", tmp_path / "cases"
    )
    experiment = smoke_experiment(tmp_path / "cases", *FAST)
    result = train(experiment, tmp_path / "run")
    assert {(row["site"], row["organ"]) for row in result.scores} == {
        (site, organ) for site in ("upper", "lower") for organ in experiment.vocabulary
    }


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.name)
def test_commands_in_comments_can_be_copied_to_a_shell(path):
    """Indented comments are commands; one that goes on in the next line says so, as a shell wants it."""
    comments = "\n".join(line.removeprefix("#") for line in path.read_text().splitlines() if line.startswith("#"))
    commands = [line.strip() for line in comments.replace("\\\n", " ").splitlines() if line.startswith("   ")]
    for command in commands:
        words = shlex.split(command, comments=True)
        assert words[0] in ("panorgan", "python"), command
        assert not [word for word in words if word.startswith("(")], command
    assert comments.count("--set") == sum(word == "--set" for c in commands for word in shlex.split(c, comments=True))


@pytest.mark.parametrize("name", ["acdc.yaml", "acdc_2d.yaml"])
def test_the_options_for_a_gpu_in_the_comments_fit_together(name):
    options = re.findall(r"--set (?:'([^']*)'|(\S+))", (EXAMPLES / name).read_text())
    experiment = load_experiment(EXAMPLES / name, [quoted or plain for quoted, plain in options])
    assert len(options) == 8 + (name == "acdc.yaml")
    assert experiment.training.rounds == 200


def test_fediod_on_acdc_is_as_its_paper_says_and_so_are_its_baselines():
    """Every number of the method's own recipe; every method that the comments compare, with its settings."""
    path = EXAMPLES / "acdc_fediod.yaml"
    experiment, content = load_experiment(path), path.read_text()
    recipe = dict(find_method("fediod").recipe)
    assert recipe["training.local_epochs"] == 1
    for setting, value in recipe.items():
        found = functools.reduce(lambda place, key: place[key], setting.split("."), experiment.model_dump())
        assert (list(found) if isinstance(found, tuple) else found) == value, setting
    network = experiment.build_method().build_network(experiment.network, federation_of(experiment))
    assert sum(p.numel() for p in network.parameters()) == 11_865_590  # the paper: about 11.15 million
    compared, gates = (listed.split(",") for listed in re.findall(r"--methods (\S+)", content))
    assert gates == ["multidecoder", "fediod", "fediod+gate=sigmoid"]
    asked = ",".join([*gates, "fediod+transformer_rate=0.125+fusion_scale=2", "fediod+training.optimizer.name=adamw"])
    built = [entry.applied_to(experiment) for entry in parse_methods(asked)]
    factors = [set(e.build_method().rate_factors(e.training.optimizer.name).values()) for e in built]
    assert factors == [set(), {1.0}, {1.0}, {0.125}, {1 / 16}]
    assert [getattr(e.build_method().config, "gate", None) for e in built] == [
        None,
        "softmax",
        "sigmoid",
        *["softmax"] * 2,
    ]
    assert compared == ["solo", "fedavg", "fedprox", "segviz", "flkd", "ufps", "fediod", "central_full"]
    for method in compared:
        assert load_experiment(path, [f"method={{name: {method}}}"]).method["name"] == method
    options = [quoted or plain for quoted, plain in re.findall(r"--set (?:'([^']*)'|(\S+))", content)]
    assert load_experiment(path, options).training.rounds == 20


def federation_of(experiment: Experiment) -> Federation:
    facts = {name: SiteInfo(name, 1, dict.fromkeys(site.annotated or (), 1)) for name, site in experiment.sites.items()}
    return Federation(Vocabulary(experiment.vocabulary), facts)


@pytest.mark.skipif(not (DATA / "acdc").is_dir(), reason="ACDC is not in ../shared/data")
@pytest.mark.parametrize("name", ["acdc.yaml", "acdc_2d.yaml"])
def test_acdc_sites_share_no_patient_and_keep_both_frames_together(name):
    """79 patients (one scan is there twice) with two frames each; at every site 8 are tested and 3 validate."""
    experiment = load_experiment(EXAMPLES / name)
    sites = prepare(experiment, on_progress=None).sites
    seen: set[str] = set()
    for site in sites:
        parts = [{case.id.split("_")[0] for case in cases} for cases in (site.train, site.validation, site.test)]
        assert sum(len(part) for part in parts) == len(set().union(*parts)), "a patient in two splits"
        assert [len(cases) for cases in (site.train, site.validation, site.test)] == [2 * len(part) for part in parts]
        assert not seen & set().union(*parts), "a patient at two sites"
        seen |= set().union(*parts)
        assert [len(parts[1]), len(parts[2])] == [3, 8]
    assert len(seen) == 79
    assert "patient076" not in seen
    assert {site.name: site.annotated for site in sites} == {
        "right": ("heart_right_ventricle",),
        "muscle": ("heart_myocardium",),
        "left": ("heart_left_ventricle",),
    }
