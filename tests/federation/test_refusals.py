"""Everything the coordinator refuses: by name, with the reason in events.jsonl, and the others go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from federations import THREE, Meddling, make_coordinator, make_workers, same
from refusing import refused

from panorgan.anatomy import Vocabulary
from panorgan.errors import MessageError
from panorgan.federation.checks import check_answer, check_size, outliers, read_introduction, read_scores
from panorgan.federation.collector import SitesMissingError
from panorgan.federation.events import read_events
from panorgan.federation.message import Message, MessageFile
from panorgan.federation.tasks import Task, answer_meta
from panorgan.preparation.plan import PlanSettings

SMALL = {"rounds": 1, "validate_every": 0, "local_steps": 1}

Change = Callable[[dict[str, torch.Tensor], dict[str, float], dict[str, Any]], None]


def edited(answer: bytes, change: Change) -> bytes:
    message = Message.from_bytes(answer)
    tensors, numbers, meta = dict(message.tensors), dict(message.scalars), dict(message.meta)
    change(tensors, numbers, meta)
    return Message(tensors, numbers, meta).to_bytes()


def happened(folder, kind: str) -> list[dict[str, Any]]:
    return [event.facts for event in read_events(folder / "events.jsonl") if event.kind == kind]


@pytest.fixture
def three(tiny):
    return lambda **training: tiny(phantom=THREE, training={**SMALL, **training})


def set_key(key: str, value: torch.Tensor) -> Change:
    return lambda tensors, numbers, meta: tensors.update({key: value})


def set_meta(**values: object) -> Change:
    return lambda tensors, numbers, meta: meta.update(values)


def _not_finite(tensors, numbers, meta) -> None:
    tensors["head.conv.conv.bias"] = torch.full_like(tensors["head.conv.conv.bias"], float("nan"))


def _out_of_all_proportion(tensors, numbers, meta) -> None:
    tensors["head.conv.conv.bias"] = tensors["head.conv.conv.bias"] + 1e6


BIAS = "head.conv.conv.bias"
TAMPERED: dict[str, tuple[Change, str, str]] = {
    "another experiment": (set_meta(experiment="0" * 16), "misaddressed", "'experiment'"),
    "another run": (set_meta(run="another"), "misaddressed", "'another'"),
    "another question": (set_meta(answers="evaluate/train/1"), "misaddressed", "'evaluate/train/1'"),
    "another name": (set_meta(site="south"), "misaddressed", "'south'"),
    "shape": (set_key(BIAS, torch.zeros(99)), "wrong-shape", "(99,)"),
    "type": (set_key(BIAS, torch.zeros(5, dtype=torch.float16)), "wrong-type", "torch.float16"),
    "key": (set_key("backdoor", torch.zeros(1)), "unknown-key", "'backdoor'"),
    "not finite": (_not_finite, "not-finite", BIAS),
    "size": (set_key("ballast", torch.zeros(1 << 20)), "answer-too-large", "bytes"),
    "outlier": (_out_of_all_proportion, "outlier", "training.outlier_factor allows 10"),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_tampered_update_is_refused_and_the_others_go_on(what, three, tmp_path):
    change, code, named = TAMPERED[what]

    def meddle(site: str, kind: str, answer: bytes):
        return [(site, edited(answer, change) if (site, kind) == ("north", "train") else answer)]

    experiment = three()
    coordinator = make_coordinator(experiment, tmp_path, Meddling(make_workers(experiment, tmp_path), meddle))
    coordinator.run()
    (reported,) = happened(tmp_path, "refused")
    assert (reported["number"], reported["site"], reported["code"]) == (1, "north", code)
    assert named in reported["why"]
    (round_,) = happened(tmp_path, "round")
    assert set(round_["sites"]) == {"south", "west"}
    assert not happened(tmp_path, "missing")


def test_a_message_of_an_earlier_round_cannot_be_used_again(three, tmp_path):
    first: dict[str, bytes] = {}

    def replay(site: str, kind: str, answer: bytes):
        return [(site, first.setdefault(site, answer) if (site, kind) == ("north", "train") else answer)]

    experiment = three(rounds=2)
    make_coordinator(experiment, tmp_path, Meddling(make_workers(experiment, tmp_path), replay)).run()
    (reported,) = happened(tmp_path, "refused")
    assert (reported["number"], reported["site"], reported["code"]) == (2, "north", "misaddressed")
    assert all(question in reported["why"] for question in ("'train/train/1'", "'train/train/2'"))


def test_nobody_can_speak_for_another(three, tmp_path):
    """West sends what south has answered, byte for byte."""
    south: list[bytes] = []

    def meddle(site: str, kind: str, answer: bytes):
        if (site, kind) == ("west", "train"):
            return [(site, south[0])]
        south.extend([answer] if (site, kind) == ("south", "train") else [])
        return [(site, answer)]

    experiment = three()
    make_coordinator(experiment, tmp_path, Meddling(make_workers(experiment, tmp_path), meddle)).run()
    (reported,) = happened(tmp_path, "refused")
    assert (reported["site"], reported["code"]) == ("west", "misaddressed")
    assert all(name in reported["why"] for name in ("'site'", "'south'", "'west'"))


@pytest.mark.parametrize("kind", ["join", "train", "evaluate"])
@pytest.mark.parametrize(("sender", "code"), [("nobody", "not-asked"), ("north", "answered-twice")])
def test_an_answer_that_nobody_waits_for_changes_nothing(kind, sender, code, three, tmp_path):
    experiment = three(validate_every=1)

    def forged(tensors, numbers, meta) -> None:
        meta["site"] = sender
        tensors.update({key: value + 1 for key, value in tensors.items()})
        numbers.update(dict.fromkeys(numbers, 0.0))

    def meddle(site: str, asked: str, answer: bytes):
        more = [(sender, edited(answer, forged))] if (site, asked) == ("north", kind) else []
        return [(site, answer), *more]

    disturbed = make_coordinator(experiment, tmp_path / "a", Meddling(make_workers(experiment, tmp_path / "a"), meddle))
    disturbed.run()
    quiet = make_coordinator(experiment, tmp_path / "b", Meddling(make_workers(experiment, tmp_path / "b")))
    quiet.run()
    (reported,) = happened(tmp_path / "a", "refused")
    assert (reported["site"], reported["code"]) == (sender, code)
    assert same(disturbed.state.weights, quiet.state.weights)
    assert disturbed.state.scores == quiet.state.scores
    assert disturbed.state.sites == quiet.state.sites


def test_a_site_that_is_not_listed_is_not_even_asked(three, tmp_path):
    experiment = three(rounds=2)
    transport = Meddling(make_workers(experiment, tmp_path))
    listed = frozenset({"north", "south"})
    coordinator = make_coordinator(experiment, tmp_path, transport, listed=listed)
    coordinator.run()
    assert set(coordinator.state.sites) == listed
    assert "west" not in {site for _, site in transport.asked}
    (reported,) = happened(tmp_path, "refused")  # once, not every round
    assert (reported["site"], reported["code"]) == ("west", "site-not-listed")


def test_an_unknown_code_of_failure_does_not_travel_further(three, tmp_path):
    """A code is one of a few words. Anything else could carry what should have stayed at the site."""

    def meddle(site: str, kind: str, answer: bytes):
        leak = edited(answer, set_meta(failed="/data/patient-0815.nii.gz"))
        return [(site, leak if (site, kind) == ("north", "train") else answer)]

    experiment = three()
    make_coordinator(experiment, tmp_path, Meddling(make_workers(experiment, tmp_path), meddle)).run()
    (failed,) = happened(tmp_path, "failed")
    assert (failed["site"], failed["code"]) == ("north", "internal")
    assert "0815" not in (tmp_path / "events.jsonl").read_text()


# -- introductions and scores ------------------------------------------------------------------------------------

COUNTED = {"train_cases": 3.0, "plan/cases": 3.0, "plan/ct_cases": 3.0}
MEASURED = (
    COUNTED
    | {"plan/hu_low/liver": -50.0, "plan/hu_high/liver": 150.0}
    | {f"plan/{what}_mm/{axis}": value for what, value in (("spacing", 14.0), ("extent", 300.0)) for axis in "RAS"}
)


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ({"annotated/unicorn": 1.0}, "unknown-structure"),
        ({"train_cases": -3.0}, "bad-counts"),
        ({"annotated/liver": -1.0}, "bad-counts"),
        ({"annotated/liver": 1000.0}, "bad-counts"),
        ({"plan/spacing_mm/R": -14.0}, "bad-statistics"),
        ({"plan/cases": 0.0}, "bad-statistics"),
        ({"plan/ct_cases": 4.0}, "bad-statistics"),
        ({"plan/hu_low/liver": 200.0}, "bad-statistics"),
        ({"n" * (1 << 20): 0.0}, "answer-too-large"),
    ],
    ids=["structure", "no cases", "less than none", "more than all", "spacing", "none", "CT", "range", "size"],
)
def test_a_nonsensical_introduction_is_refused(numbers, code, three, tmp_path):
    def meddle(site: str, kind: str, answer: bytes):
        reported = MEASURED | (numbers if site == "north" else {})
        return [(site, edited(answer, lambda tensors, own, meta: own.update(reported)))]

    experiment = three()
    transport = Meddling(make_workers(experiment, tmp_path), meddle)
    plan = PlanSettings(spacing_mm="pooled", window_hu="pooled")
    coordinator = make_coordinator(experiment, tmp_path, transport, plan=plan)
    assert set(coordinator.state.sites) == {"south", "west"}
    assert coordinator.state.plan is not None
    assert coordinator.state.plan["spacing_mm"] == [14.0, 14.0, 14.0]
    (reported,) = happened(tmp_path, "refused")
    assert (reported["site"], reported["code"]) == ("north", code)


@pytest.mark.parametrize("score", [1.0000001, -0.1, 7.0])
def test_a_score_outside_0_and_1_is_refused(score, three, tmp_path):
    def meddle(site: str, kind: str, answer: bytes):
        boast = edited(answer, lambda tensors, numbers, meta: numbers.update({"dice/liver": score}))
        return [(site, boast if (site, kind) == ("north", "evaluate") else answer)]

    experiment = three(validate_every=1)
    coordinator = make_coordinator(experiment, tmp_path, Meddling(make_workers(experiment, tmp_path), meddle))
    coordinator.run()
    (reported,) = happened(tmp_path, "refused")
    assert (reported["site"], reported["code"]) == ("north", "not-a-dice")
    assert set(coordinator.state.scores) == {"south", "west"}


TASK = Task("evaluate", "run", experiment="e")


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_the_ends_of_the_scale_are_scores(score):
    answer = Message(scalars={"dice/liver": score}, meta=answer_meta(TASK, "a")).to_bytes()
    assert read_scores(answer, TASK, "a", Vocabulary(["liver"])).dice == {"liver": score}


def test_a_site_may_annotate_nothing_and_all_of_its_cases():
    numbers = {"train_cases": 3.0, "annotated/liver": 3.0}
    for reported, expected in ((numbers, {"liver": 3}), ({"train_cases": 0.0}, {})):
        answer = Message(scalars=reported, meta=answer_meta(TASK, "a")).to_bytes()
        facts, _ = read_introduction(answer, TASK, "a", Vocabulary(["liver"]))
        assert facts.annotated == expected


# -- how large is too large --------------------------------------------------------------------------------------


def test_the_largest_answer_that_can_be_right():
    """10 numbers of 4 bytes, 1 KiB for a name, 1 MiB for the rest: 40 + 1024 + 1048576."""
    expected = {"weight": torch.zeros(10)}
    check_size(bytes(1_049_640), "a", expected)
    with refused("answer-too-large", MessageError) as caught:
        check_size(bytes(1_049_641), "a", expected)
    assert all(number in caught.value.why for number in ("1049641", "1049640"))


def test_the_norm_of_an_update(tmp_path):
    """(3, 4) and 12 away from what was sent out: √(9 + 16 + 144) = 13. Whole numbers do not count."""
    task = Task("train", "run")
    expected = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([[5.0]]), "steps": torch.tensor(0)}
    sent = {"a": torch.tensor([4.0, 5.0]), "b": torch.tensor([[-7.0]]), "steps": torch.tensor(1000)}
    path = tmp_path / "answer.safetensors"
    path.write_bytes(Message(sent, meta=answer_meta(task, "x")).to_bytes())
    assert check_answer(MessageFile(path), task, "x", expected) == 13.0


@pytest.mark.parametrize(
    ("norms", "factor", "found"),
    [
        ({"a": 3.0, "b": 4.0, "c": 40.0}, 10.0, set()),  # exactly ten times the median
        ({"a": 3.0, "b": 4.0, "c": 40.1}, 10.0, {"c"}),
        ({"a": 3.0, "b": 4.0, "c": 8.1}, 2.0, {"c"}),
        ({"a": 1.0, "b": 3.0, "c": 5.0, "d": 80.0}, 10.0, {"d"}),  # the median of four: 4
        ({"a": 1.0, "b": 3.0, "c": 5.0, "d": 40.0}, 10.0, set()),
        ({"a": 3.0, "b": 4.0, "c": 1e9}, None, set()),  # switched off
        ({"a": 3.0, "b": 1e9}, 10.0, set()),  # two cannot tell which of them is wrong
        ({"a": 0.0, "b": 0.0, "c": 1.0}, 10.0, set()),  # no other site moved: nothing to compare with
    ],
)
def test_which_update_is_out_of_all_proportion(norms, factor, found):
    assert outliers(norms, factor).keys() == found


def test_outliers_are_let_through_where_the_experiment_says_so(three, tmp_path):
    def meddle(site: str, kind: str, answer: bytes):
        return [(site, edited(answer, _out_of_all_proportion) if (site, kind) == ("north", "train") else answer)]

    experiment = three(outlier_factor=None)
    make_coordinator(experiment, tmp_path, Meddling(make_workers(experiment, tmp_path), meddle)).run()
    assert not happened(tmp_path, "refused")


def test_an_outlier_is_asked_again_when_the_round_is_resumed(three, tmp_path):
    """Its answer is not kept on disk: the site may have been mended meanwhile."""
    experiment = three(rounds=1, min_sites=3, outlier_factor=10.0)
    sick = {"north"}

    def meddle(site: str, kind: str, answer: bytes):
        if kind == "train" and site in sick:
            message = Message.from_bytes(answer)
            blown_up = {
                key: value * 1e4 if value.is_floating_point() else value for key, value in message.tensors.items()
            }
            answer = Message(blown_up, message.scalars, message.meta).to_bytes()
        return [(site, answer)]

    transport = Meddling(make_workers(experiment, tmp_path), meddle)
    with refused("too-few-answers", SitesMissingError) as caught:
        make_coordinator(experiment, tmp_path, transport).run()
    assert caught.value.sites == ("north",)
    assert [(facts["site"], facts["code"]) for facts in happened(tmp_path, "refused")] == [("north", "outlier")]

    sick.clear()
    transport.asked.clear()
    again = make_coordinator(experiment, tmp_path, transport)
    again.run()
    assert [site for kind, site in transport.asked if kind == "train"] == ["north"], "and only that one"
    assert set(happened(tmp_path, "round")[0]["sites"]) == {"north", "south", "west"}


@pytest.mark.parametrize("ratio", [0.0, 1.0, 250.0])
def test_any_ratio_of_volumes_from_zero_on_is_one(ratio):
    answer = Message(scalars={"dice/liver": 0.5, "volume/liver": ratio}, meta=answer_meta(TASK, "a")).to_bytes()
    assert read_scores(answer, TASK, "a", Vocabulary(["liver"])).volume == {"liver": ratio}


def test_a_ratio_of_volumes_below_zero_is_refused():
    answer = Message(scalars={"dice/liver": 0.5, "volume/liver": -0.1}, meta=answer_meta(TASK, "a")).to_bytes()
    with refused("negative-volume", MessageError):
        read_scores(answer, TASK, "a", Vocabulary(["liver"]))


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"1e999"])
def test_a_ratio_of_volumes_that_is_not_finite_is_refused(value):
    """It stands in the header as text, as long as the number that it replaces."""
    honest = Message(scalars={"dice/liver": 0.5, "volume/liver": 12345678.5}, meta=answer_meta(TASK, "a")).to_bytes()
    assert honest.count(b"12345678.5") == 1
    with pytest.raises(MessageError):
        read_scores(honest.replace(b"12345678.5", value.ljust(10)), TASK, "a", Vocabulary(["liver"]))


@pytest.mark.parametrize("family", ["dice", "volume"])
@pytest.mark.parametrize("organ", ["gallbladder", "", "=cmd()"])
def test_a_score_of_something_else_than_the_vocabulary_is_refused(organ, family):
    answer = Message(scalars={"dice/liver": 0.5, f"{family}/{organ}": 0.5}, meta=answer_meta(TASK, "a")).to_bytes()
    with refused("unknown-structure", MessageError) as caught:
        read_scores(answer, TASK, "a", Vocabulary(["liver"]))
    assert str(caught.value).replace("\n", "").isprintable()


def test_an_invented_organ_in_the_scores_is_refused_and_the_others_go_on(three, tmp_path):
    def meddle(site: str, kind: str, answer: bytes):
        change = edited(answer, lambda tensors, numbers, meta: numbers.update({"dice/gallbladder": 1.0}))
        return [(site, change if (site, kind) == ("north", "evaluate") else answer)]

    experiment = three(validate_every=1)
    coordinator = make_coordinator(experiment, tmp_path, Meddling(make_workers(experiment, tmp_path), meddle))
    coordinator.run()
    (reported,) = happened(tmp_path, "refused")
    assert (reported["site"], reported["code"]) == ("north", "unknown-structure")
    assert reported["why"].isprintable()
    assert set(coordinator.state.scores) == {"south", "west"}


@pytest.mark.parametrize("name", ["a" * 300, "loss\u202e"])
def test_a_number_whose_name_cannot_be_shown_is_refused(name, tmp_path):
    task = Task("train", "run", experiment="e")
    path = tmp_path / "answer.safetensors"
    path.write_bytes(Message({"w": torch.zeros(1)}, {name: 1.0}, answer_meta(task, "a")).to_bytes())
    with refused("unprintable-name", MessageError) as caught:
        check_answer(MessageFile(path), task, "a", {"w": torch.zeros(1)})
    assert caught.value.why.isprintable()
