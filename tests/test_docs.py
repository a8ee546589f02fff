"""The documentation's snippets run, and every method and room is mentioned where people look."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import typer
import yaml
from layout_folders import marks, numbered, save
from safetensors.torch import load_file

import panorgan
from panorgan.anatomy import Vocabulary
from panorgan.cli.main import app
from panorgan.config import Experiment, SiteSettings, parse_experiment
from panorgan.data.layouts import find_layout, layouts, read_cases
from panorgan.losses.partial import marginal_cross_entropy, member_matrix
from panorgan.losses.unified_label import allowed_channels
from panorgan.methods import registry
from panorgan.methods.about.metadata import describe
from panorgan.methods.base import Payload, SiteTools
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.networks import UNet, UNetSettings
from panorgan.preparation.batch import Batch
from panorgan.report import metrics_page
from panorgan.report.methods_page import COMMAND, methods_page

ROOT = Path(__file__).parent.parent


def snippets(path: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), flags=re.DOTALL)


@pytest.fixture
def example_method(monkeypatch):
    """A method of docs/add-a-method.md by its name, registered for one test."""
    monkeypatch.setattr(registry, "_registered", dict(registry.methods()))
    for source, name in zip(snippets("docs/add-a-method.md", "python"), ("slow_decoder", "kept_norms"), strict=True):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)  # where pydantic looks for the names in annotations
        exec(compile(source, "docs/add-a-method.md", "exec"), module.__dict__)
    return registry.find_method


def test_the_example_method_works(example_method):
    method = example_method("slow_decoder")
    federation = Federation(Vocabulary(["liver"]), {"a": SiteInfo("a", 1, {"liver": 1})})
    rule = method.Server(method.Config(share=0.25), federation, {"decoder.w": torch.zeros(1), "head.w": torch.zeros(1)})
    rule.round_info = RoundInfo("train", 1, 1)

    class Answers:
        sites = ("a",)

        def keys(self, site):
            return ("decoder.w", "head.w")

        def tensor(self, site, key):
            return torch.ones(1)

        def mean(self, weight):
            return {key: self.tensor("a", key) for key in self.keys("a")}

    rule.aggregate(Answers())
    assert rule.weights["decoder.w"].item() == 0.25
    assert rule.weights["head.w"].item() == 1.0
    (share,) = describe(method).own_fields
    assert (share.name, share.type, share.default) == ("share", "number ≥ 0, ≤ 1", 0.5)


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_the_example_with_a_part_that_stays_keeps_it(example_method, norm):
    method = example_method("kept_norms")
    vocabulary, facts = Vocabulary(["liver", "spleen"]), SiteInfo("a", 1, {"liver": 1})

    def site():
        model = UNet(vocabulary, UNetSettings(features=(2, 4), norm=norm))
        federation = Federation(vocabulary, {"a": facts, "b": SiteInfo("b", 1, {"spleen": 1})})
        return method.Site(
            method.Config(unlabelled="received"),
            facts,
            federation,
            SiteTools(model, torch.optim.SGD(model.parameters())),
        )

    def filled(rule, value):
        return {key: torch.full_like(tensor, value) for key, tensor in rule.model.state_dict().items()}

    def play(rule, received):
        """A round that receives one number everywhere and trains to the next; the value of each key before it."""
        rule.received = Payload(filled(rule, received))
        rule.before_round()
        began = {key: int(tensor.flatten()[0]) for key, tensor in rule.model.state_dict().items()}
        assert all(torch.equal(t, rule.model.state_dict()[k]) for k, t in rule.received_model.state_dict().items())
        rule.model.load_state_dict(filled(rule, received + 1))
        rule.after_round()
        return began

    first = site()
    assert set(play(first, 1).values()) == {1}  # nothing of its own yet
    restarted = site()
    restarted.load_state(first.state())
    norms = set(first.model.parts()["norm"])
    assert {key for key in norms if key.endswith("running_mean")} or norm == "instance"
    for rule in (first, restarted):
        assert play(rule, 5) == {key: 2 if key in norms else 5 for key in rule.model.state_dict()}


def test_the_example_with_a_part_that_stays_trains_on_after_a_cut(example_method, tiny, tmp_path):
    def weights(folder, resume=False, name="kept_norms", listeners=()):
        method = {"name": name, "server_step": 1, "unlabelled": "received"}
        training = {"rounds": 3, "validate_every": 0, "select": "last"}
        experiment = tiny(method=method, network={"norm": "batch"}, training=training)
        panorgan.train(experiment, tmp_path / folder, resume=resume, listeners=listeners)
        return load_file(tmp_path / folder / "model" / "model.safetensors")

    def stop(event):
        if event.kind == "round" and event.facts["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weights("cut", listeners=[stop])
    whole, resumed, fedavg = weights("whole"), weights("cut", resume=True), weights("fedavg", name="fedavg")
    assert [key for key in whole if not torch.equal(whole[key], resumed[key])] == []
    assert [key for key in whole if not torch.equal(whole[key], fedavg[key])] != []


def test_the_metadata_that_a_method_shows_is_that_of_its_file():
    page = (ROOT / "docs" / "add-a-method.md").read_text()
    quoted = re.search(r"From `fedprox.py`:\n\n```\n(.*?)```", page, flags=re.DOTALL)[1].splitlines()
    source = (ROOT / "src" / "panorgan" / "methods" / "fedprox.py").read_text().splitlines()
    assert len(quoted) > 5
    assert [line for line in quoted if line not in source] == []


def test_the_example_layout_reads_its_folder(tmp_path, monkeypatch):
    (source,) = snippets("docs/add-a-layout.md", "python")
    module = types.ModuleType("btcv")
    exec(compile(source, "docs/add-a-layout.md", "exec"), module.__dict__)
    monkeypatch.setattr("panorgan.data.layouts.layouts", lambda: {**layouts(), "btcv": module.LAYOUT})
    save(tmp_path / "img" / "img0001.nii.gz")
    save(tmp_path / "label" / "label0001.nii.gz", numbered(1, 6, 9, 3))
    save(tmp_path / "img" / "img0061.nii.gz")
    assert find_layout(tmp_path).name == "btcv"
    first, test = read_cases(tmp_path, "here", Vocabulary(["liver", "inferior_vena_cava", "kidney_left"]))
    assert (first.id, first.patient, first.annotated) == (
        "0001",
        "0001",
        ("inferior_vena_cava", "kidney_left", "liver"),
    )
    assert marks(first, "liver") == [False, True, False, False]
    assert marks(first, "inferior_vena_cava") == [False, False, True, False]
    assert marks(first, "kidney_left") == [False, False, False, True]
    assert (test.id, test.annotated) == ("0061", ())


def test_the_losses_of_the_page_about_partial_labels_are_what_the_code_gives():
    page = (ROOT / "docs" / "partial-labels.md").read_text()
    table = re.findall(r"^\| \w+ \| (not )?liver \| ([a-z ]+) \| ([\d. |]+) \|$", page, flags=re.MULTILINE)
    rows = [[float(cell) for cell in numbers.split("|")] for _, _, numbers in table]
    assert len(rows) == 3
    logits = torch.tensor([row[:3] for row in rows]).log().unsqueeze(2)  # a voxel is a sample: [3, 3, 1]
    liver = torch.tensor([not outside for outside, _, _ in table]).view(3, 1, 1)
    batch = Batch(torch.zeros(3, 1, 1), liver, torch.ones(3, 1, dtype=torch.bool), ("liver",), ("a", "b", "c"))
    vocabulary = Vocabulary(["liver", "spleen"])
    names = ("background", *vocabulary)
    open_ = [
        " or ".join(n for n, ok in zip(names, row[:, 0], strict=True) if ok)
        for row in allowed_channels(batch, vocabulary)
    ]
    assert open_ == [words for _, words, _ in table]
    naive = replace(
        batch, masks=F.pad(liver, (0, 0, 0, 1)), annotated=torch.ones(3, 2).bool(), structures=tuple(vocabulary)
    )
    for column, labels in ((3, batch), (4, naive)):
        members = member_matrix(labels, vocabulary, logits.device)
        losses = marginal_cross_entropy(logits, labels.masks, labels.annotated, members)
        assert [f"{loss:.2f}" for loss in losses] == [f"{row[column]:.2f}" for row in rows]


def test_the_page_about_methods_is_fresh():
    written = (ROOT / "docs" / "methods.md").read_text()
    assert written == methods_page(), f"docs/methods.md is stale; write it anew: {COMMAND}"


def test_the_page_about_metrics_is_fresh():
    written = (ROOT / "docs" / "metrics.md").read_text()
    assert written == metrics_page.metrics_page(), f"docs/metrics.md is stale; write it anew: {metrics_page.COMMAND}"


def test_the_readme_experiment_is_valid():
    (text,) = snippets("README.md", "yaml")
    experiment = parse_experiment(yaml.safe_load(text))
    assert experiment.sites["west"].external


def test_the_guide_for_own_data_is_valid():
    """Its experiment parses, also with the plan pasted in; every layout is on it; its commands and options exist."""
    page = (ROOT / "docs" / "your-own-data.md").read_text()
    first, plan = (yaml.safe_load(text) for text in snippets("docs/your-own-data.md", "yaml"))
    assert parse_experiment(first).plan.measures
    pasted = {**first, "plan": plan["plan"], "training": {**first["training"], **plan["training"]}}
    assert not parse_experiment(pasted).plan.measures
    named = re.findall(r"^\| (`[a-z`, ]+`) \|", page, flags=re.MULTILINE)
    assert set(re.findall(r"`([a-z]+)`", " ".join(named))) == set(layouts())
    commands = typer.main.get_command(app).commands
    for name, rest in re.findall(
        r"panorgan ([a-z]+)([^#`\n]*)", " ".join(re.findall(r"(?:```sh\n.*?```|`[^`]+`)", page, re.DOTALL))
    ):
        assert name in commands, name
        options = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= options, (name, rest)


def test_every_method_is_in_the_readme_and_every_room_in_the_map():
    readme = (ROOT / "README.md").read_text()
    assert [name for name in registry.methods() if f"`{name}`" not in readme] == []
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [p.name for p in (ROOT / "src" / "panorgan").iterdir() if p.is_dir() and not p.name.startswith("_")]
    assert [room for room in rooms if f"{room}/" not in page] == []


def test_links_between_pages_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "notebooks").glob("*.ipynb")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_settings_page_names_real_settings_with_their_defaults():
    """Every dotted name on the page exists, and every key at the top and under a site is on it."""
    page = (ROOT / "docs" / "experiment-file.md").read_text()
    whole = parse_experiment({"vocabulary": ["liver"], "phantom": {}}).model_dump()
    whole["training"].setdefault("start_from", None)  # left out where it is not used
    for dotted in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", page):
        if dotted.endswith((".yaml", ".json", ".csv")):
            continue
        place = whole
        for key in dotted.split("."):
            assert key in place, dotted
            place = place[key]
    top = {"splits", "plan", "network", "training", "hardware"}  # described key by key
    assert [key for key in Experiment.model_fields if key not in top and f"| `{key}` |" not in page] == []
    assert [key for key in SiteSettings.model_fields if f"| `{key}` |" not in page] == []
    for key, default in (("rounds", 100), ("local_steps", 20), ("validate_every", 5)):
        assert f"| `training.{key}` | {default} |" in page
        assert whole["training"][key] == default
