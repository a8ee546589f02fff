"""Coordinator and site workers together, on the tiny phantom federation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from federations import Tampering, make_coordinator, make_workers, run, same
from refusing import refused

from panorgan.anatomy import Vocabulary
from panorgan.errors import ConfigError, RunError
from panorgan.federation.admission import check_coverage
from panorgan.federation.events import Event
from panorgan.federation.message import Message
from panorgan.federation.site import SiteWorker
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.base import Method, Payload, SiteRule
from panorgan.methods.protocol import SiteInfo
from panorgan.preparation.batch import Batch


def test_a_round_is_the_weighted_mean_of_what_the_sites_sent(tiny, tmp_path):
    plain = {"name": "fedavg", "server_step": 1, "organ_parts": "everyone"}
    experiment = tiny(method=plain, training={"rounds": 1, "validate_every": 0})
    sent: dict[str, dict[str, torch.Tensor]] = {}

    def keep(site: str, answer: bytes) -> bytes:
        sent[site] = {k: v.clone() for k, v in Message.from_bytes(answer).tensors.items()}
        return answer

    workers = make_workers(experiment, tmp_path)
    counts = {name: worker.facts().train_cases for name, worker in workers.items()}
    assert counts["north"] != counts["south"]
    coordinator = make_coordinator(experiment, tmp_path, Tampering(workers, keep))
    coordinator.run()
    total = sum(counts.values())
    for key, value in coordinator.state.weights.items():
        expected = sum(sent[s][key].double() * counts[s] / total for s in sorted(sent))
        torch.testing.assert_close(value, expected.float(), rtol=1e-6, atol=1e-7)


def test_same_seed_same_bits_other_seed_other_bits(tiny, tmp_path):
    first = run(tiny(), tmp_path / "a")
    second = run(tiny(), tmp_path / "b")
    other = run(tiny(seed=1), tmp_path / "c")
    assert same(first.state.weights, second.state.weights)
    assert first.state.best == second.state.best
    assert not same(first.state.weights, other.state.weights)


def test_a_run_in_pieces_equals_a_run_in_one_go(tiny, tmp_path):
    experiment = tiny(training={"rounds": 4, "optimizer": {"learning_rate": 0.01, "keep_state": True}})
    whole = run(experiment, tmp_path / "whole")
    for _ in range(4):
        pieces = run(experiment, tmp_path / "pieces", rounds=1)  # new workers and coordinator every time
    assert pieces.state.rounds_done == 4
    assert same(whole.state.weights, pieces.state.weights)


def test_keeping_the_optimiser_matters(tiny, tmp_path):
    kept = run(tiny(training={"optimizer": {"learning_rate": 0.01, "keep_state": True}}), tmp_path / "kept")
    fresh = run(tiny(training={"optimizer": {"learning_rate": 0.01, "keep_state": False}}), tmp_path / "fresh")
    assert not same(kept.state.weights, fresh.state.weights)


def poisoned(value: float) -> Callable[[str, bytes], bytes]:
    def change(site: str, answer: bytes) -> bytes:
        message = Message.from_bytes(answer)
        tensors = {k: v.clone() for k, v in message.tensors.items()}
        first = next(iter(tensors))
        tensors[first].view(-1)[0] = value
        return Message(tensors, message.scalars, message.meta).to_bytes() if site == "north" else answer

    return change


def altered(edit: Callable[[dict, dict], None]) -> Callable[[str, bytes], bytes]:
    def change(site: str, answer: bytes) -> bytes:
        message = Message.from_bytes(answer)
        tensors, meta = dict(message.tensors), dict(message.meta)
        edit(tensors, meta)
        return Message(tensors, message.scalars, meta).to_bytes() if site == "north" else answer

    return change


def _resize(tensors, meta):
    tensors["head.conv.conv.bias"] = torch.zeros(99)


def _halve(tensors, meta):
    tensors["head.conv.conv.bias"] = tensors["head.conv.conv.bias"].half()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (poisoned(float("nan")), "not-finite"),
        (poisoned(float("inf")), "not-finite"),
        (altered(_resize), "wrong-shape"),
        (altered(_halve), "wrong-type"),
        (altered(lambda tensors, meta: tensors.update(extra=torch.ones(1))), "unknown-key"),
        (altered(lambda tensors, meta: tensors.clear()), "no-weights"),
        (altered(lambda tensors, meta: meta.update(answers="train/train/9")), "misaddressed"),
        (altered(lambda tensors, meta: meta.update(run="another run")), "misaddressed"),
        (altered(lambda tensors, meta: meta.update(site="south")), "misaddressed"),
        (lambda site, answer: b"garbage" if site == "north" else answer, "not-a-message"),
        (
            lambda site, answer: answer.replace(b'version\\": 1', b'version\\": 7') if site == "north" else answer,
            "message-version",
        ),
    ],
    ids=["nan", "inf", "shape", "type", "unknown key", "empty", "round", "run", "sender", "garbage", "version"],
)
def test_a_bad_update_is_refused_by_name_and_the_round_goes_on(tiny, tmp_path, change, code):
    experiment = tiny(training={"rounds": 1, "validate_every": 0, "local_steps": 1})
    heard: list[Event] = []
    coordinator = make_coordinator(experiment, tmp_path, Tampering(make_workers(experiment, tmp_path), change), heard)
    coordinator.run()
    reported = [event.facts for event in heard if event.kind == "refused"]
    assert [(facts["site"], facts["code"]) for facts in reported] == [("north", code)]
    assert ("learning_rate" in reported[0].get("fix", "")) == (code == "not-finite")
    # what remains is exactly the round of the other site alone
    transport = Tampering(make_workers(experiment, tmp_path), drop=("none",))
    alone = make_coordinator(experiment, tmp_path / "alone", transport)
    transport.drop = ("north",)  # north joined, then fell silent
    alone.run()
    assert same(coordinator.state.weights, alone.state.weights)
    assert all(torch.isfinite(v).all() for v in coordinator.state.weights.values())


def test_a_run_that_diverged_says_to_lower_the_learning_rate(tiny, tmp_path):
    experiment = tiny(training={"rounds": 1, "validate_every": 0, "local_steps": 1, "min_sites": 2})
    transport = Tampering(make_workers(experiment, tmp_path), poisoned(float("nan")))
    with refused("too-few-answers", RunError) as caught:
        make_coordinator(experiment, tmp_path, transport).run()
    assert "training.optimizer.learning_rate" in caught.value.fix


def test_too_few_answers_stop_the_run_and_lose_nothing(tiny, tmp_path):
    experiment = tiny(training={"rounds": 2, "validate_every": 0, "min_sites": 2})
    workers = make_workers(experiment, tmp_path)
    transport = Tampering(workers)
    coordinator = make_coordinator(experiment, tmp_path, transport)
    coordinator.run(rounds=1)
    transport.drop = ("north",)
    with refused("too-few-answers", RunError) as caught:
        coordinator.run()
    assert caught.value.fix
    # north is back: south's answer of the broken round is still on disk and is not asked for again
    transport.drop, transport.asked = (), []
    again = make_coordinator(experiment, tmp_path, transport)
    again.run()
    assert transport.asked == ["north"]
    assert again.state.rounds_done == 2
    assert same(again.state.weights, run(experiment, tmp_path / "undisturbed").state.weights)


def test_validation_uses_only_what_each_site_annotates(tiny, tmp_path):
    heard: list[Event] = []
    experiment = tiny(training={"rounds": 1, "validate_every": 1})
    coordinator = make_coordinator(experiment, tmp_path, LocalTransport(make_workers(experiment, tmp_path)), heard)
    coordinator.run()
    (validation,) = [event.facts["validation"] for event in heard if event.kind == "round"]
    assert {site: set(scores) for site, scores in validation.items()} == {
        "north": {"liver"},
        "south": {"spleen", "kidney"},
    }
    means = [sum(s.values()) / len(s) for s in validation.values()]
    assert coordinator.state.best == {"round": 1.0, "dice": pytest.approx(sum(means) / 2)}


class Counting(Method):
    """A method with private state at the site: counts rounds and adds the count to the loss."""

    name = "counting"

    class Site(SiteRule):
        """Keeps a counter that must survive restarts and must not be counted twice."""

        count = 0.0

        def loss(self, batch: Batch) -> torch.Tensor:
            return super().loss(batch) * (1 + self.count)

        def after_round(self) -> None:
            self.count += 1

        def state(self) -> Payload:
            return Payload({"noise": torch.full((2,), self.count)}, {"count": self.count})

        def load_state(self, state: Payload) -> None:
            assert state.tensors["noise"].tolist() == [state.scalars["count"]] * 2
            self.count = state.scalars["count"]


def test_the_bytes_of_training_are_told_apart_from_those_of_validation(tiny, tmp_path):
    """Rounds 2 and 3 are validated, which sends the model once more; training costs the same in all three."""
    heard: list[Event] = []
    experiment = tiny()
    make_coordinator(experiment, tmp_path, LocalTransport(make_workers(experiment, tmp_path)), heard).run()
    rounds = [event.facts for event in heard if event.kind == "round"]
    everything = [reported["bytes_sent"] + reported["bytes_received"] for reported in rounds]
    training = [reported["bytes_training"] for reported in rounds]
    assert training[0] == everything[0]
    assert training[1:] == pytest.approx([training[0]] * 2, rel=0.01)
    assert all(more > 1.4 * less for more, less in zip(everything[1:], training[1:], strict=True))


def test_a_site_asked_twice_answers_the_same_and_counts_once(tiny, tmp_path):
    experiment = tiny(training={"rounds": 3, "validate_every": 0})
    requests: list[bytes] = []
    answers: list[bytes] = []

    def workers() -> dict[str, SiteWorker]:
        made = make_workers(experiment, tmp_path)
        for worker in made.values():
            object.__setattr__(worker.setup, "method", Counting(experiment.build_method().config))
        return made

    class Recording(LocalTransport):
        def exchange(self, sites, make_request, on_reply, deadline=None):
            def record(site):
                request = make_request(site)
                if site == "north":
                    requests.append(request)
                return request

            def heard(site, answer):
                if site == "north":
                    answers.append(answer)
                on_reply(site, answer)

            super().exchange(sites, record, heard)

    first = workers()
    coordinator = make_coordinator(experiment, tmp_path, Recording(first))
    coordinator.run()
    assert first["north"].handle(requests[-1]) == answers[-1], "asked again in the same process"
    restarted = workers()["north"]
    assert restarted.handle(requests[-1]) == answers[-1], "asked again after a restart"
    assert restarted.handle(requests[-2]) == answers[-2], "the newest checkpoint is damaged: once more the one before"
    assert restarted.handle(requests[-1]) == answers[-1]
    with refused("round-already-finished", RunError) as caught:
        restarted.handle(requests[-3])
    assert caught.value.fix


def test_a_round_that_broke_off_does_not_leak_into_the_next_try(tiny, tmp_path, monkeypatch):
    experiment = tiny(training={"rounds": 2, "validate_every": 0})
    undisturbed = run(experiment, tmp_path / "undisturbed")
    workers = make_workers(experiment, tmp_path / "broken")
    coordinator = make_coordinator(experiment, tmp_path / "broken", LocalTransport(workers))
    coordinator.run(rounds=1)
    original = SiteRule.after_round

    def out_of_memory(self) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(SiteRule, "after_round", out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        coordinator.run()
    monkeypatch.setattr(SiteRule, "after_round", original)
    again = make_coordinator(experiment, tmp_path / "broken", LocalTransport(workers))
    again.run()
    assert same(again.state.weights, undisturbed.state.weights)


def test_coverage_names_the_site_or_the_organ():
    vocabulary = Vocabulary(["liver", "spleen"])
    whole = {"a": SiteInfo("a", 3, {"liver": 3}), "b": SiteInfo("b", 2, {"spleen": 2})}
    check_coverage(vocabulary, whole)
    with refused("unlabelled-organ", ConfigError) as caught:
        check_coverage(vocabulary, {"a": whole["a"]})
    assert "spleen" in caught.value.what
    with refused("unlabelled-organ", ConfigError) as caught:  # a liver mask does not show its tumours
        check_coverage(Vocabulary(["liver", "spleen", "liver_tumour"]), whole)
    assert "liver_tumour" in caught.value.what
    check_coverage(Vocabulary(["kidney_left", "kidney_right"]), {"a": SiteInfo("a", 1, {"kidney": 1})})
    for cases, code in ((2, "annotates-nothing"), (0, "no-training-cases")):
        with refused(code, ConfigError) as caught:
            check_coverage(vocabulary, whole | {"c": SiteInfo("c", cases, {})})
        assert caught.value.where == "sites.c"


def test_a_score_that_is_no_dice_does_not_choose_the_model(tiny, tmp_path):
    class Boasting(LocalTransport):
        def exchange(self, sites, make_request, on_reply, deadline=None):
            def boast(site: str, answer: bytes) -> None:
                message = Message.from_bytes(answer)
                if site == "north" and message.meta["answers"].startswith("evaluate"):
                    answer = Message({}, {"dice/liver": 7.0}, message.meta).to_bytes()
                on_reply(site, answer)

            super().exchange(sites, make_request, boast)

    experiment = tiny(training={"rounds": 1, "validate_every": 1, "local_steps": 1})
    heard: list[Event] = []
    coordinator = make_coordinator(experiment, tmp_path, Boasting(make_workers(experiment, tmp_path)), heard)
    coordinator.run()
    reported = [event.facts for event in heard if event.kind == "refused"]
    assert [(facts["site"], facts["code"]) for facts in reported] == [("north", "not-a-dice")]
    assert coordinator.state.best["dice"] <= 1
