"""examples/paper: every paper's setting as an experiment file, and what `panorgan methods NAME --yaml` prints."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import typer
import yaml
from invoking import invoke

from panorgan.anatomy import Vocabulary
from panorgan.cli.main import app
from panorgan.config import Experiment, load_experiment, parse_experiment
from panorgan.data.layouts import read_cases
from panorgan.fetching.catalogue import data_sets
from panorgan.methods.about.experiment import experiment_text
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.methods.registry import find_method, methods
from panorgan.workflows.ablate import plan_ablation
from panorgan.workflows.compare import plan_comparison
from panorgan.workflows.compare_entries import parse_methods
from panorgan.workflows.execute import train

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "examples" / "paper").glob("*.yaml"))
SYSTEMS = ("fediod", "flkd", "segviz", "ufps")
PAPERS = [path for path in FILES if path.stem in SYSTEMS]
# The label names in the dataset.json of the decathlon's sets.
DECATHLON = {
    "Task03_Liver": ["liver", "cancer"],
    "Task06_Lung": ["cancer"],
    "Task07_Pancreas": ["pancreas", "cancer"],
    "Task08_HepaticVessel": ["Vessel", "Tumour"],
    "Task09_Spleen": ["spleen"],
    "Task10_Colon": ["colon cancer primaries"],
}
TABLES = {
    # A table or a figure → what differs from the paper's own file, besides the name.
    "fediod_single_layer": {"method"},
    "flkd_21_sites": {"sites"},
    "flkd_table_10": {"method"},
    "flkd_table_11": {"method"},
    "segviz_2_sites": {"sites", "vocabulary"},
    "segviz_3_sites": {"sites", "vocabulary"},
    "segviz_late_join": {"sites"},
    "ufps_figure_7c": {"method"},
    "ufps_figure_8": {"method"},
}
COMPARED = sorted({*TABLES, *SYSTEMS})
RUN_HERE = {
    "flkd": ("DoDNet", "Sep_Enc"),
    "flkd_21_sites": ("Scaffold", "global"),
    "flkd_table_10": ("FedAvg_250x480", "KD_1000x120"),
    "ufps": ("fedcrld", "cps"),
}
"""Entries that are run, where all of them would take minutes."""
TRAINED = {
    "fediod": {"liver": {"liver"}, "pancreas": {"pancreas"}},
    "flkd": {
        "liver": {"liver", "liver_tumour"},
        "hepatic_vessel": {"hepatic_vessel", "liver_tumour"},
        "pancreas": {"pancreas", "pancreas_tumour"},
        "colon": {"colon_tumour"},
        "lung": {"lung_tumour"},
        "spleen": {"spleen"},
    },
    "segviz": {"liver": {"liver"}, "spleen": {"spleen"}, "pancreas": {"pancreas"}},
}


def test_every_paper_has_its_file():
    assert [path.stem for path in PAPERS] == [*SYSTEMS]
    assert {path.stem for path in FILES} == {*SYSTEMS, *TABLES}


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_a_paper_s_file_has_every_number_of_the_recipe_and_only_known_sets(path):
    experiment = load_experiment(path)
    content = experiment.model_dump(mode="json")
    recipe = dict(find_method(path.stem).recipe)
    assert len(recipe) >= 10
    found = {
        setting: functools.reduce(lambda place, key: place[key], setting.split("."), content) for setting in recipe
    }
    assert found == recipe
    assert {site.folder.name for site in experiment.sites.values()} <= {one.folder for one in data_sets().values()}
    assert [name for name, site in experiment.sites.items() if site.external] == ["btcv"]
    fetched = {line.split()[-1] for line in path.read_text().splitlines() if line.startswith("#   panorgan fetch ")}
    assert {data_sets()[name].folder for name in fetched} == {s.folder.name for s in experiment.sites.values()}


@pytest.mark.parametrize("method", TRAINED)
def test_the_names_in_the_decathlon_s_files_are_understood(method, tmp_path, monkeypatch):
    monkeypatch.setenv("PANORGAN_DATA", str(tmp_path))
    for folder, names in DECATHLON.items():
        write_decathlon(tmp_path / folder, names)
    experiment = load_experiment(ROOT / "examples" / "paper" / f"{method}.yaml")
    annotated = {}
    for name, site in experiment.sites.items():
        if site.folder.exists():
            vocabulary = Vocabulary(experiment.vocabulary)
            (case,) = read_cases(site.folder, name, vocabulary, None, site.annotated, site.layout, site.labels)
            annotated[name] = set(case.annotated)
    assert annotated == TRAINED[method]


def write_decathlon(folder: Path, names: list[str]) -> None:
    labels = np.zeros((4, 4, 4), dtype=np.uint8)
    labels[: len(names), 0, 0] = range(1, len(names) + 1)
    for place in ("imagesTr", "labelsTr"):
        (folder / place).mkdir(parents=True)
        nib.save(nib.Nifti1Image(labels, np.eye(4)), folder / place / "a.nii.gz")
    listed = {"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}
    known = {str(number): name for number, name in enumerate(["background", *names])}
    (folder / "dataset.json").write_text(json.dumps({"labels": known, "training": [listed]}))


def paper(name: str) -> str:
    """The example without its first line, which leads to the schema in the repository."""
    return (ROOT / "examples" / "paper" / f"{name}.yaml").read_text().partition("\n")[2]


@pytest.mark.parametrize("name", sorted(methods()))
def test_every_method_prints_an_experiment_that_can_be_used(name):
    text = experiment_text(find_method(name))
    assert parse_experiment(yaml.safe_load(text)).method["name"] == name
    assert (name in SYSTEMS) == ("phantom: {}" not in text)
    if name in SYSTEMS:
        assert text == paper(name), "copy it from examples/paper"


def test_the_command_prints_the_file(capfd, monkeypatch):
    code, out, _ = invoke(capfd, monkeypatch, "methods", "flkd", "--yaml")
    assert (code, out) == (0, paper("flkd"))
    assert invoke(capfd, monkeypatch, "methods", "--yaml")[0] == 2
    assert invoke(capfd, monkeypatch, "methods", "flkd", "--yaml", "--json")[0] == 2


# -- tables and figures ------------------------------------------------------------------------------------------------


def commands(name: str) -> list[list[str]]:
    """The commands in a file's head, as a shell takes them apart."""
    comments = [line[1:] for line in (ROOT / "examples" / "paper" / f"{name}.yaml").read_text().splitlines()]
    joined = "\n".join(comments).replace("\\\n", "").splitlines()
    return [shlex.split(line) for line in joined if line.startswith("   panorgan")]


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_the_commands_in_its_head_are_panorgan_s_and_about_this_file(name):
    """Arguments and options as the command line takes them apart; only `fetch` is about something else."""
    kinds = typer.main.get_command(app).commands
    listed = [words[1:] for words in commands(name)]
    assert {kind for kind, *_ in listed} & {"train", "compare"}
    for kind, *words in listed:
        parsed = kinds[kind].make_context(kind, list(words)).params
        if kind != "fetch":
            assert str(parsed["experiment"]) == f"examples/paper/{name}.yaml"
            assert str(parsed["run"]).startswith(f"runs/paper_{name}")


@pytest.mark.parametrize("name", ["fediod", "ufps"])
def test_an_ablation_can_be_planned(name, tmp_path):
    assert [words[2] for words in commands(name) if words[1] == "ablate"] == [f"examples/paper/{name}.yaml"]
    ablation = plan_ablation(load_experiment(ROOT / "examples" / "paper" / f"{name}.yaml"), folder=tmp_path)
    assert ablation.method == name
    assert len(ablation.plan.runs) == 3 * len(ablation.rows) >= 9


def test_no_two_commands_write_into_one_folder():
    folders = [words[words.index("--run") + 1] for path in FILES for words in commands(path.stem) if "--run" in words]
    assert len(set(folders)) == len(folders) >= len(FILES)


def compared(name: str) -> dict[str, str]:
    """The options of its comparison."""
    (words,) = [words for words in commands(name) if words[1] == "compare"]
    assert words[2] == f"examples/paper/{name}.yaml"
    return {option.lstrip("-"): value for option, value in zip(words[3::2], words[4::2], strict=True)}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_s_file_is_the_paper_s_but_for_what_it_is_about(name):
    own, paper_s = (
        load_experiment(ROOT / "examples" / "paper" / f"{one}.yaml").model_dump(mode="json")
        for one in (name, name.partition("_")[0])
    )
    assert {section for section in own if own[section] != paper_s[section]} == {"name", *TABLES[name]}
    assert own["name"] == f"paper_{name}"


@pytest.mark.parametrize("name", COMPARED)
def test_a_comparison_can_be_planned(name, tmp_path):
    """Every entry is checked: its method, its settings, and that no two are the same."""
    options = compared(name)
    experiment = load_experiment(ROOT / "examples" / "paper" / f"{name}.yaml")
    plan = plan_comparison(experiment, options["methods"], options["seeds"], options["reference"], tmp_path)
    assert len(plan.runs) == 3 * len(plan.entries) >= 6


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("fediod", "meloss dodnet fedmenu pipofan med3d c2fnas fediod"),
        ("flkd", "DoDNet Sep_Enc FedAvg FedProx Scaffold global local both"),
        ("flkd_21_sites", "DoDNet Sep_Enc FedAvg FedProx Scaffold global local both"),
        ("segviz", "solo central_naive segviz fedavg"),
        (
            "ufps",
            "solo central_full fedcrld dodnet_pl cps mskd fedavg_pl fedprox_pl moon_pl fedalign_pl fedasam_pl ufps",
        ),
    ],
)
def test_a_paper_s_table_has_all_its_methods_and_plain_means(name, labels):
    """FedExP's step is not in these papers."""
    entries = applied(name)
    assert list(entries) == labels.split()
    alone = {"solo", "central_full", "central_naive"}
    steps = {label: e.build_method().config.server_step for label, e in entries.items() if label not in alone}
    assert set(steps.values()) == {1}, steps


@pytest.mark.parametrize("name", ["segviz", "segviz_2_sites", "segviz_3_sites"])
def test_segviz_s_comparisons_have_one_loss(name):
    losses = {(c.dice_weight, c.ce_weight) for c in (e.build_method().config for e in applied(name).values())}
    assert losses == {(1, 0)}


def applied(name: str) -> dict[str, Experiment]:
    experiment = load_experiment(ROOT / "examples" / "paper" / f"{name}.yaml")
    return {entry.label: entry.applied_to(experiment) for entry in parse_methods(compared(name)["methods"])}


def test_table_10_has_the_same_number_of_steps_in_every_row():
    rows = applied("flkd_table_10")
    assert [(e.training.rounds, e.training.local_steps) for e in rows.values()] == 2 * [
        (250, 480),
        (500, 240),
        (1000, 120),
        (2000, 60),
        (4000, 30),
    ]
    assert {e.training.rounds * e.training.local_steps for e in rows.values()} == {120_000}
    weights = [(e.method.get("global_weight", 1), e.method["local_weight"]) for e in rows.values()]
    assert weights == 5 * [(0, 0)] + 5 * [(1, 0)]


def test_21_hospitals_are_three_parts_of_each_of_seven_sets():
    sites = load_experiment(ROOT / "examples" / "paper" / "flkd_21_sites.yaml").sites
    training = {name: site for name, site in sites.items() if not site.external}
    assert len(training) == 21
    parts = {(site.folder, site.part) for site in training.values()}
    assert len(parts) == 21
    assert {part for _, part in parts} == {(1, 3), (2, 3), (3, 3)}
    assert len({folder for folder, _ in parts}) == 7


def test_figure_8_has_the_nine_kinds_of_steps_on_pseudo_labels_alone():
    settings = [e.build_method().config for e in applied("ufps_figure_8").values()]
    kinds = ["none", "augmented", "augmented", "asam", "random", "usam", "usam", "both", "topk", "susam", "susam"]
    assert [c.sharpness for c in settings] == kinds
    assert [c.sharpness_start for c in settings] == [0.6, 0] + 8 * [0.6] + [0.4]
    assert [c.perturbed_share for c in settings] == 6 * [1] + [0.2] + 4 * [1]
    assert settings[8].local_share == 0.5
    assert {(c.weight_schedule, c.reverse_ce, c.main_teacher, c.uncertainty_aware) for c in settings} == {
        ("none", False, False, "none")
    }


def test_a_single_layer_per_organ_is_far_smaller():
    small, whole = (applied("fediod_single_layer")[label] for label in ("single_layer", "whole"))
    facts = {name: SiteInfo(name, 1, {name: 1}) for name in ("liver", "kidney", "pancreas")}
    federation = Federation(Vocabulary(small.vocabulary), facts)
    with torch.device("meta"):
        networks = [e.build_method().build_network(e.network, federation) for e in (small, whole)]
    few, many = (sum(p.numel() for key, p in n.named_parameters() if key.startswith("decoders.")) for n in networks)
    assert few == 3 * (16 * 2 + 2)
    assert many > 1000 * few


def shrunk(name: str, tiny_content: Callable[..., dict[str, Any]]) -> Experiment:
    """A paper's experiment on made scans: its method and its sites, small in everything else."""
    experiment = load_experiment(ROOT / "examples" / "paper" / f"{name}.yaml")
    content = tiny_content()
    sites = [name for name, site in experiment.sites.items() if not site.external]
    organs = content["vocabulary"][: len(experiment.vocabulary)]
    content["vocabulary"] = organs
    content["phantom"]["sites"] = [
        {
            "name": site,
            "annotated": organs[place :: len(sites)] or [organs[place % len(organs)]],
            "cases": 3,
            "spacing_mm": [14, 14, 14],
            "joins_at": 2 if experiment.sites[site].joins_at else None,
        }
        for place, site in enumerate(sites)
    ]
    content["method"] = dict(experiment.method)
    content["network"] = {"features": [4, 4, 8], "dimensions": experiment.network.dimensions}
    rounds = 3 if any(site.joins_at for site in experiment.sites.values()) else 2
    content["training"] |= {"rounds": rounds, "local_steps": 1, "validate_every": rounds}
    if experiment.network.dimensions == 2:
        content["training"]["sampling"] = {"patch_size": [16, 16, 1], "batch_size": 4}
    return parse_experiment(content)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
def test_a_comparison_runs_at_a_small_size(name, tiny_content, tmp_path):
    """Every entry once, to the end; of 21 sites those that send most."""
    fewer = re.sub(
        r"rounds=(\d+)\+training.local_steps=(\d+)",
        lambda found: f"rounds={int(found[1]) // 250}+training.local_steps={int(found[2]) // 30}",
        compared(name)["methods"],
    )
    plan = plan_comparison(shrunk(name, tiny_content), fewer, "0", compared(name)["reference"], tmp_path)
    chosen = [planned for planned in plan.runs if planned.entry.label in RUN_HERE.get(name, plan.labels)]
    assert len(chosen) >= 2
    for planned in chosen:
        train(planned.experiment, planned.folder.path)
        assert planned.folder.complete
