"""What a site accepts from a coordinator: only what follows from the agreement.

The fingerprint in a request says which experiment the coordinator claims to run. These checks compare the rest of the
request with the experiment file at the site: stage, round, plan, sites, and the tensors in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from panorgan.anatomy import Vocabulary
from panorgan.errors import AnatomyError
from panorgan.federation.failures import NotAgreedError
from panorgan.federation.settings import TrainingSettings
from panorgan.federation.tasks import Task
from panorgan.methods.base import Method
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo, Stage, Tensors
from panorgan.networks import UNetSettings
from panorgan.preparation.plan import POOLED, Plan, PlanSettings

if TYPE_CHECKING:
    from panorgan.federation.site import SiteSetup

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MOST_SITES = 1000
_MOST_CASES = 10**7
# A pooled voxel size and window are medians and percentiles of scans of people.
_SPACING_MM = (0.1, 50.0)
_WINDOW_HU = (-1024.0, 3072.0)
# Extra tensors of a method (masks, attention maps), for which no weight gives a size.
_MOST_EXTRAS = 64
_MOST_ELEMENTS = 2**22
_LONGEST_KEY = 200


def check_request(task: Task, site: str, setup: SiteSetup) -> None:
    """Refuse a request that does not follow from the agreement. Its payload is checked where it is used."""
    if not _RUN.fullmatch(task.run):
        raise _refusal("the run has no plain name", repr(task.run[:100]), code="bad-run-name")
    stages = setup.method.stages(setup.training.rounds)
    _check_round(task, stages, setup.training)
    if setup.plan is not None and (task.plan is not None or task.kind != "join"):
        check_plan(task.plan, setup.plan)
    if task.kind != "join":
        check_sites(task.sites, setup.vocabulary)
        if site not in task.sites:
            raise _refusal(
                "this site is not among those that take part", ", ".join(sorted(task.sites)), code="site-left-out"
            )


def validation_due(training: TrainingSettings, stages: Sequence[Stage], round_info: RoundInfo) -> bool:
    """Whether the agreement includes a validation after a round."""
    every = training.validate_every
    validated = {stage.name for stage in stages if stage.validate}
    due = every > 0 and (round_info.round % every == 0 or round_info.round == round_info.rounds)
    return due and round_info.stage in validated


def validations(training: TrainingSettings, stages: Sequence[Stage]) -> int:
    """The number of validations that the agreement includes in a whole run."""
    schedule = (RoundInfo(stage.name, n, stage.rounds) for stage in stages for n in range(1, stage.rounds + 1))
    return sum(validation_due(training, stages, round_info) for round_info in schedule)


def _check_round(task: Task, stages: Sequence[Stage], training: TrainingSettings) -> None:
    round_info = task.round_info
    said = f"round {round_info.round} of {round_info.rounds} of {round_info.stage!r:.50}"
    if task.kind == "join":
        if (round_info.stage, round_info.round) != ("", 0):
            raise _refusal("an introduction belongs to no round", said, code="join-in-a-round")
        return
    agreed = {stage.name: stage.rounds for stage in stages}
    rounds = agreed.get(round_info.stage)
    if rounds is None or round_info.rounds != rounds or not 1 <= round_info.round <= rounds:
        stages_said = ", ".join(f"{count} of {name}" for name, count in agreed.items())
        raise _refusal("there is no such round", f"it asks for {said}; agreed are {stages_said}", code="no-such-round")
    if task.kind == "evaluate" and not validation_due(training, stages, round_info):
        raise _refusal(
            "no model is scored after this round",
            f"it asks for {said}; validate_every is {training.validate_every}",
            code="no-validation-due",
        )
    if task.kind == "deliver" and (round_info.stage, round_info.round) != (stages[-1].name, stages[-1].rounds):
        raise _refusal("a model comes after the last round", f"it refers to {said}", code="delivered-early")


# -- the plan ----------------------------------------------------------------------------------------------------


def check_plan(plan: Mapping[str, Any] | None, agreed: PlanSettings) -> Plan:
    """Refuse a plan that is invalid, contradicts the agreement, or that no scans can have led to."""
    try:
        read = Plan.model_validate(dict(plan or {}), strict=False)
    except (ValidationError, ValueError, TypeError) as error:
        raise _refusal("its plan is invalid", f"{plan!r:.200}", code="not-a-plan") from error
    if plan is None or plan != read.as_json():
        raise _refusal("its plan is none", f"{plan!r:.200}", code="not-a-plan")
    for name in Plan.model_fields:
        wanted, said = getattr(agreed, name), getattr(read, name)
        if wanted != POOLED and said != wanted and not (name == "window_hu" and read.intensity == "zscore"):
            raise _refusal(
                "its plan differs from the agreement",
                f"{name} is {said!r}, agreed is {wanted!r}",
                code="plan-not-agreed",
            )
    spacing, window = read.spacing_mm, read.window_hu
    if agreed.spacing_mm == POOLED and not all(_within(mm, _SPACING_MM) for mm in spacing):
        raise _refusal("its plan cannot come from scans", f"spacing_mm is {list(spacing)}", code="implausible-plan")
    if agreed.window_hu == POOLED and not all(_within(hu, _WINDOW_HU) for hu in window):
        raise _refusal("its plan cannot come from scans", f"window_hu is {list(window)}", code="implausible-plan")
    return read


def _within(value: float, limits: tuple[float, float]) -> bool:
    return math.isfinite(value) and limits[0] <= value <= limits[1]


# -- who takes part ----------------------------------------------------------------------------------------------


def check_sites(sites: Mapping[str, SiteInfo], vocabulary: Vocabulary) -> None:
    """Refuse invalid names, structures outside the vocabulary, and impossible counts."""
    if len(sites) > _MOST_SITES:
        raise _refusal("too many sites take part", f"{len(sites)}", code="too-many-sites")
    for name, facts in sites.items():
        if not _NAME.fullmatch(name):
            raise _refusal("a site has no plain name", repr(name[:100]), code="bad-site-name")
        if not 0 <= facts.train_cases <= _MOST_CASES:
            raise _refusal(f"{name} cannot have so many cases", str(facts.train_cases), code="implausible-cases")
        for structure, count in facts.annotated.items():
            try:
                vocabulary.members(structure)
            except AnatomyError as error:
                raise _refusal(
                    f"{name} annotates what is not in the vocabulary",
                    repr(structure[:100]),
                    code="unknown-structure",
                ) from error
            if not 0 <= count <= facts.train_cases:
                raise _refusal(
                    f"{name} counts its cases wrongly",
                    f"{count} of {facts.train_cases} show {structure}",
                    code="bad-counts",
                )


# -- tensors -----------------------------------------------------------------------------------------------------


def network_outline(method: Method, settings: UNetSettings, federation: Federation) -> Tensors:
    """Keys, shapes and types of the network that the federation delivers, on the meta device."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return dict(method.build_network(settings, federation).state_dict())


def check_model(tensors: Tensors, network: Tensors) -> None:
    """Refuse a whole model whose keys or shapes are not those of the network."""
    if odd := sorted(tensors.keys() ^ network.keys()):
        raise _refusal(
            "its model is not that of the agreed network",
            f"{len(odd)} keys differ, such as {odd[0]!r:.100}",
            code="wrong-network",
        )
    for key, value in tensors.items():
        _check_tensor(key, value, network[key])


def check_received(tensors: Tensors, network: Tensors, others: Tensors) -> None:
    """Refuse tensors for training that do not fit: weights by their shape, tensors named after a weight
    (`control/<weight>`, `teacher/<site>/<weight>`) by that weight's shape, and all others by their size.

    `network` is what the site trains, `others` what the whole federation has.
    """
    extras = 0
    largest = max(_MOST_ELEMENTS, sum(value.numel() for value in others.values()))
    for key, value in tensors.items():
        if len(key) > _LONGEST_KEY or not key.isprintable():
            raise _refusal("a tensor has no plain name", repr(key[:100]), code="bad-tensor-name")
        example = network.get(key)
        rest = key
        while example is None and rest:
            example = network.get(rest, others.get(rest))
            rest = rest.partition("/")[2]
        if example is not None:
            _check_tensor(key, value, example)
            continue
        extras += 1
        if extras > _MOST_EXTRAS or value.numel() > largest:
            raise _refusal(
                "it carries more than a method needs",
                f"{key!r} has the shape {list(value.shape)}",
                code="too-many-extras",
            )


def _check_tensor(key: str, value: torch.Tensor, example: torch.Tensor) -> None:
    if value.shape != example.shape or value.is_floating_point() != example.is_floating_point():
        why = f"{key!r} is {value.dtype} {list(value.shape)}, the network has {example.dtype} {list(example.shape)}"
        raise _refusal("a tensor does not fit the agreed network", why, code="wrong-tensor")


def _refusal(what: str, why: str, *, code: str) -> NotAgreedError:
    return NotAgreedError(
        f"The request is not what this site agreed to: {what}.",
        code=code,
        why=why,
        fix="Nothing was computed or sent. Ask the coordinator what runs there, and compare the versions of panorgan.",
    )
