"""What holds for every registered method. Each that is federated trains once and is asked several questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from watching import Watched, leaks, watched_run

from panorgan.anatomy import Vocabulary
from panorgan.config import Experiment
from panorgan.federation.audit import verify
from panorgan.federation.egress import default_policy
from panorgan.methods.about.metadata import describe
from panorgan.methods.about.uploads import uploads
from panorgan.methods.fediod import method as fediod
from panorgan.methods.protocol import Federation
from panorgan.methods.registry import methods

FEDERATED = [name for name, method in methods().items() if not method.pooled]
CHOICES: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in FEDERATED},
    "segviz fine-tuning": {"name": "segviz", "finetune_rounds": 1},
}


@dataclass(frozen=True)
class Trained:
    """A whole run of a method, with its sites and all that they sent."""

    experiment: Experiment
    sites: Mapping[str, Watched]


@pytest.fixture(scope="module", params=CHOICES.values(), ids=CHOICES.keys())
def trained(
    request: pytest.FixtureRequest, tiny: Callable[..., Experiment], tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    """On voxels as they are stored: augmentation would only make them harder to recognise.

    The guard stands before every answer, as between hospitals: what the method did not declare ends the run. Two
    rounds, the first and the last; of FedIOD one in between, where it sends attention maps.
    """
    name = request.param["name"]
    rounds = 3 if name == "fediod" else 2
    training = {"rounds": rounds, "validate_every": rounds, "local_steps": 2, "augment": None}
    network = {} if name == "fediod" else {"features": [4, 8]}  # attention wants a small deepest level
    experiment = tiny(method=request.param, training=training, network=network)
    folder = tmp_path_factory.mktemp("watched")
    return Trained(experiment, watched_run(experiment, folder, default_policy(name)))


# -- what leaves a site ----------------------------------------------------------------------------------------------


def test_all_that_it_sends_is_declared_and_written_into_the_log(trained: Trained):
    stages = {stage.name for stage in trained.experiment.build_method().stages(trained.experiment.training.rounds)}
    for site in trained.sites.values():
        assert {task.kind for task, _ in site.sent} == {"join", "train", "evaluate"}
        assert {task.round_info.stage for task, _ in site.sent if task.kind == "train"} == stages
        assert any(message.tensors for task, message in site.sent if task.kind == "train")
        report = verify(site.log)
        assert report.ok
        assert report.entries == len(site.sent)


def test_nothing_that_it_sends_shows_an_image(trained: Trained):
    assert leaks(trained.sites) == set()


def test_stage_by_stage_its_updates_have_the_sizes_that_its_description_says(trained: Trained, monkeypatch):
    experiment, sites = trained.experiment, trained.sites
    # Attention maps are as large as sites agree; here one of 64 tokens, where descriptions assume the paper's.
    monkeypatch.setattr(fediod, "_PAPER", {fediod.DEPTH: 1.0, fediod.TOKENS: 64.0})
    facts = {name: site.worker.facts() for name, site in sites.items()}
    federation = Federation(Vocabulary(experiment.vocabulary), facts)
    promised: dict[str, set[float]] = {}
    for upload in uploads(experiment.build_method(), experiment.network, federation, experiment.training.rounds):
        promised.setdefault(upload.stage, set()).add(upload.size)
    sizes: dict[tuple[str, int], list[int]] = {}
    for site in sites.values():
        for task, message in site.sent:
            if task.kind == "train":
                size = sum(tensor.numel() * tensor.element_size() for tensor in message.tensors.values())
                sizes.setdefault((task.round_info.stage, task.round_info.round), []).append(size)
    measured: dict[str, set[float]] = {}
    for (stage, _), all_sites in sizes.items():
        assert len(all_sites) == len(sites)
        measured.setdefault(stage, set()).add(sum(all_sites) / len(sites))
    assert measured == promised


# -- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", methods())
def test_every_method_is_described(name):
    described = describe(methods()[name])
    assert described.name == name
    assert described.title != name, "the first line of its file is 'Title — what it does'"
    assert described.explanation
    assert described.summary
    assert [field.name for field in described.fields if not field.meaning] == [], "a field needs a description"
    assert described.stages
    if described.equations:
        assert described.paper, "equations of what?"


@pytest.mark.parametrize("name", FEDERATED)
def test_whatever_a_method_sends_it_declares(name):
    described = describe(methods()[name])
    everything = [*described.sent, *(upload for variant in described.variants for upload in variant.sent)]
    assert {pattern for upload in everything for pattern in upload.tensors} <= set(described.tensors)


@pytest.mark.parametrize("name", FEDERATED)
def test_every_declared_tensor_comes_with_a_sentence(name):
    for pattern, sentence in methods()[name].tensors.items():
        assert pattern not in ("", "*"), "say which"
        assert sentence.endswith("."), f"{pattern}: a sentence for the hospital"
        assert len(sentence) > 20
