"""A site answers what follows from the agreement, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from federations import make_workers

from panorgan.errors import PanorganError
from panorgan.federation.failures import code_of
from panorgan.federation.message import Message
from panorgan.federation.site import SiteWorker
from panorgan.federation.tasks import Task
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.preparation.plan import PlanSettings

PLAN = PlanSettings(spacing_mm=(12, 12, 12), intensity="window", window_hu=(-160, 240)).resolve({}).as_json()
FIRST = RoundInfo("train", 1, 4)
BIAS = "head.conv.conv.bias"
TOO_MANY = "too-many-questions"


class Asking:
    """A coordinator that writes any request it likes to one site."""

    def __init__(self, workers: dict[str, SiteWorker], plan: PlanSettings | None = None) -> None:
        self.site = workers["north"]
        self.site.setup = replace(self.site.setup, plan=plan)
        self.facts = {name: worker.facts() for name, worker in workers.items()}
        federation = Federation(self.site.setup.vocabulary, self.facts)
        network = self.site.setup.method.build_network(self.site.setup.network, federation)
        self.weights = {key: value.clone() for key, value in network.state_dict().items()}

    def ask(self, kind: str = "train", round_info: RoundInfo = FIRST, tensors: Any = None, **task: Any) -> Message:
        whole = {"run": "run", "sites": self.facts, "experiment": self.site.setup.experiment, "plan": PLAN, **task}
        meta = Task(kind, round_info=round_info, **whole).to_meta()  # type: ignore[arg-type]
        return Message.from_bytes(self.site.handle(Message(tensors or self.weights, meta=meta).to_bytes()))

    def code(self, *arguments: Any, travels: str = "not-agreed", **task: Any) -> str:
        """Why the site refuses; the coordinator hears no more than `travels`."""
        with pytest.raises(PanorganError) as caught:
            self.ask(*arguments, **task)
        assert code_of(caught.value) == travels
        return caught.value.code


@pytest.fixture
def asking(tiny, tmp_path) -> Callable[..., Asking]:
    def make(plan: PlanSettings | None = None, **training: Any) -> Asking:
        quick = {"rounds": 4, "validate_every": 2, "local_steps": 1, **training}
        return Asking(make_workers(tiny(training=quick), tmp_path), plan)

    return make


def untouched(one: Asking) -> bool:
    """Whether the site wrote nothing down."""
    return not any(one.site._local.folder.glob("*"))


@pytest.mark.parametrize(
    "round_info",
    [
        RoundInfo("train", 1, -1),
        RoundInfo("train", 1, 40),
        RoundInfo("train", 0, 4),
        RoundInfo("train", -1, 4),
        RoundInfo("train", 5, 4),
        RoundInfo("pretrain", 1, 4),
        RoundInfo("", 1, 4),
    ],
    ids=lambda round_info: f"{round_info.stage or 'no stage'} {round_info.round}-{round_info.rounds}",
)
def test_a_round_that_was_not_agreed_is_refused(asking, round_info):
    one = asking()
    assert one.code(round_info=round_info) == "no-such-round"
    assert untouched(one)


def test_every_agreed_round_is_answered(asking):
    """The control."""
    one = asking()
    for number in (1, 2, 4):
        assert one.ask(round_info=RoundInfo("train", number, 4)).meta["answers"] == f"train/train/{number}"


@pytest.mark.parametrize("round_info", [RoundInfo("train", 1, 4), RoundInfo("", 0, 1)], ids=["a round", "no round"])
def test_an_introduction_belongs_to_no_round(asking, round_info):
    one = asking()
    if round_info.round:
        assert one.code("join", round_info, plan=None) == "join-in-a-round"
    else:
        assert one.ask("join", round_info, plan=None, sites={}).scalars["train_cases"] > 0


# -- the plan ------------------------------------------------------------------------------------------------------

FIXED = PlanSettings(spacing_mm=(12, 12, 12), intensity="window", window_hu=(-160, 240))
POOLED = PlanSettings(crop="none")


@pytest.mark.parametrize(
    ("agreed", "changes", "code"),
    [
        (FIXED, {"spacing_mm": [1.0, 1.0, 1.0]}, "plan-not-agreed"),
        (FIXED, {"window_hu": [-1000.0, 1000.0]}, "plan-not-agreed"),
        (FIXED, {"intensity": "zscore"}, "plan-not-agreed"),
        (FIXED, {"crop": "body"}, "plan-not-agreed"),
        (POOLED, {"label_interpolation": "nearest"}, "plan-not-agreed"),
        (POOLED, {"spacing_mm": [0.001, 12.0, 12.0]}, "implausible-plan"),
        (POOLED, {"spacing_mm": [12.0, 12.0, 5000.0]}, "implausible-plan"),
        (POOLED, {"window_hu": [-160.0, 1e30]}, "implausible-plan"),
        (POOLED, {"spacing_mm": [-12.0, 12.0, 12.0]}, "not-a-plan"),
        (POOLED, {"spacing_mm": "12"}, "not-a-plan"),
        (POOLED, {"command": "rm"}, "not-a-plan"),
        (POOLED, None, "not-a-plan"),
    ],
)
def test_a_plan_that_contradicts_the_agreement_or_reason_is_refused(asking, agreed, changes, code):
    one = asking(agreed)
    assert one.code(plan=None if changes is None else {**PLAN, **changes}) == code
    assert untouched(one)


@pytest.mark.parametrize("agreed", [FIXED, POOLED], ids=["fixed", "pooled"])
def test_a_plan_as_agreed_is_followed(asking, agreed):
    assert "failed" not in asking(agreed).ask().meta


def test_a_plan_stays_the_same_for_a_whole_run(asking):
    one = asking(POOLED)
    one.ask()
    other = {**PLAN, "spacing_mm": [11.0, 12.0, 12.0]}
    assert one.code(round_info=RoundInfo("train", 2, 4), plan=other) == "plan-changed"
    assert "failed" not in one.ask(round_info=RoundInfo("train", 2, 4)).meta
    assert "failed" not in one.ask(run="another-run", plan=other).meta, "another run may have another plan"


# -- who takes part ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "facts", "code"),
    [
        ("\x1b[2Jwest", SiteInfo("", 3, {"liver": 3}), "bad-site-name"),
        ("../west", SiteInfo("", 3, {"liver": 3}), "bad-site-name"),
        ("west", SiteInfo("", 3, {"unicorn": 3}), "unknown-structure"),
        ("west", SiteInfo("", 3, {"liver\x07": 3}), "unknown-structure"),
        ("west", SiteInfo("", -3, {}), "implausible-cases"),
        ("west", SiteInfo("", 10**15, {"liver": 3}), "implausible-cases"),
        ("west", SiteInfo("", 3, {"liver": 4}), "bad-counts"),
    ],
    ids=["control characters", "a path", "no organ", "an organ with a bell", "no cases", "all cases", "too many"],
)
def test_sites_and_organs_must_be_plausible(asking, name, facts, code):
    one = asking()
    assert one.code(sites={**one.facts, name: facts}) == code
    assert untouched(one)


def test_a_site_that_is_not_listed_has_no_business_here(asking):
    one = asking()
    assert one.code(sites={"south": one.facts["south"]}) == "site-left-out"


@pytest.mark.parametrize("name", ["run", "stage"])
def test_names_with_control_characters_are_no_names(asking, name):
    one = asking()
    odd = {"round_info": RoundInfo("train\n", 1, 4)} if name == "stage" else {"run": "run\x1b[2J"}
    assert one.code(**odd, travels="bad-request") == "not-a-request"


# -- tensors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({BIAS: torch.zeros(99)}, "wrong-tensor"),
        ({BIAS: torch.zeros(5, dtype=torch.int64)}, "wrong-tensor"),
        ({f"control/{BIAS}": torch.zeros(99)}, "wrong-tensor"),
        ({f"teacher/south/{BIAS}": torch.zeros(1)}, "wrong-tensor"),
        ({"ballast": torch.zeros(2**22 + 1, dtype=torch.uint8)}, "too-many-extras"),
        ({f"ballast-{number}": torch.zeros(1) for number in range(65)}, "too-many-extras"),
    ],
    ids=["shape", "type", "control variate", "teacher", "size", "number"],
)
def test_tensors_for_training_must_fit_the_network(asking, changes, code):
    one = asking()
    assert one.code(tensors={**one.weights, **changes}) == code
    assert "failed" not in one.ask().meta, "the next sound request is answered"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda weights: {**weights, BIAS: torch.zeros(99)}, "wrong-tensor"),
        (lambda weights: {**weights, "more": torch.zeros(1)}, "wrong-network"),
        (lambda weights: {key: value for key, value in weights.items() if key != BIAS}, "wrong-network"),
    ],
    ids=["shape", "one more", "one less"],
)
def test_a_model_to_score_must_be_the_whole_agreed_network(asking, change, code):
    one = asking()
    one.ask(round_info=RoundInfo("train", 2, 4))
    assert one.code("evaluate", RoundInfo("train", 2, 4), change(one.weights)) == code


# -- questions -----------------------------------------------------------------------------------------------------


def models(one: Asking) -> Callable[[int], dict[str, torch.Tensor]]:
    """As many different models as one likes."""
    return lambda number: {**one.weights, BIAS: one.weights[BIAS] + number}


def test_a_round_has_so_many_models_and_no_more(asking, asked):
    """A coordinator that was killed may come back with another model for the same round, but not again and again."""
    one = asking()
    round_info, model = RoundInfo("train", 2, 4), models(one)
    one.ask(round_info=round_info)
    first = one.ask("evaluate", round_info, model(0))
    for number in (1, 2):
        one.ask("evaluate", round_info, model(number))
    predicted = len(asked)
    assert predicted > 0
    for number in range(3, 10):
        assert one.code("evaluate", round_info, model(number), travels=TOO_MANY) == TOO_MANY
    assert one.ask("evaluate", round_info, model(0)) == first, "the same question again has the same answer"
    assert len(asked) == predicted, "and nothing was computed for it, nor for those that were refused"
    assert one.ask("evaluate", RoundInfo("train", 4, 4), model(5)).scalars, "the next round has models of its own"


def test_a_restarted_site_remembers_what_it_has_answered(asking, tiny, tmp_path):
    one = asking()
    round_info, model = RoundInfo("train", 2, 4), models(one)
    one.ask(round_info=round_info)
    answers = [one.ask("evaluate", round_info, model(number)) for number in range(3)]
    again = asking()
    assert again.site is not one.site
    assert [again.ask("evaluate", round_info, model(number)) for number in range(3)] == answers
    assert again.code("evaluate", round_info, model(3), travels=TOO_MANY) == TOO_MANY


def test_a_model_is_scored_after_agreed_rounds_only(asking):
    one = asking()
    one.ask(round_info=RoundInfo("train", 1, 4))
    for number in (1, 3):
        assert one.code("evaluate", RoundInfo("train", number, 4)) == "no-validation-due"
    for number in (2, 4):
        assert one.ask("evaluate", RoundInfo("train", number, 4)).scalars


def test_where_nothing_is_validated_no_question_is_answered(asking):
    one = asking(validate_every=0)
    one.ask(round_info=RoundInfo("train", 4, 4))
    assert one.code("evaluate", RoundInfo("train", 4, 4)) == "no-validation-due"


def test_a_run_in_which_the_site_never_trained_has_no_models_to_score(asking):
    """Else every made-up run would bring questions of its own."""
    one = asking()
    one.ask(round_info=RoundInfo("train", 1, 4))
    assert one.code("evaluate", RoundInfo("train", 2, 4), run="made-up") == "unknown-run"
