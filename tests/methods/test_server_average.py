"""Rows of the output layer, averaged by owners; and FedExP's step, by hand."""

from __future__ import annotations

import pytest
import torch
from answers import Answers

from panorgan.anatomy import Vocabulary
from panorgan.methods.base import ServerRule
from panorgan.methods.fedavg import FedAvg, FedAvgConfig
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.methods.shared.server_average import extrapolation, owner_rows, shared_keys, stepped

WEIGHT, BIAS = "head.conv.conv.weight", "head.conv.conv.bias"


def federation(**annotated: tuple[str, ...]) -> Federation:
    """Sites a, b, c… with 1, 2, 3… cases."""
    sites = {
        name: SiteInfo(name, number, dict.fromkeys(organs, number))
        for number, (name, organs) in enumerate(sorted(annotated.items()), start=1)
    }
    return Federation(Vocabulary(["liver", "spleen"]), sites)


def cases(site: str, key: str) -> float:
    return {"a": 1.0, "b": 2.0, "c": 3.0}[site]


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(-1, 1)


class TestOwnerRows:
    def test_background_by_all_organs_by_their_owners(self) -> None:
        who = federation(a=("liver",), b=("liver",), c=("spleen",))
        answers = Answers({"a": {WEIGHT: rows(6, 3, 9)}, "b": {WEIGHT: rows(6, 6, 9)}, "c": {WEIGHT: rows(0, 9, 4)}})
        found = owner_rows(answers, {WEIGHT: rows(0, 0, 0)}, who, cases)
        # Background (1·6 + 2·6 + 3·0)/6, liver (1·3 + 2·6)/3, spleen from c alone.
        assert torch.equal(found[WEIGHT], rows(3, 5, 4))

    def test_one_sigmoid_per_organ_has_no_background(self) -> None:
        who = federation(a=("liver",), b=("spleen",))
        found = owner_rows(
            Answers({"a": {BIAS: torch.tensor([1.0, 7.0])}, "b": {BIAS: torch.tensor([8.0, 2.0])}}),
            {BIAS: torch.zeros(2)},
            who,
            cases,
        )
        assert torch.equal(found[BIAS], torch.tensor([1.0, 2.0]))

    def test_an_owner_that_did_not_answer_leaves_its_row_as_it_was(self) -> None:
        who = federation(a=("liver",), b=("spleen",))
        found = owner_rows(Answers({"a": {WEIGHT: rows(1, 2, 3)}}), {WEIGHT: rows(7, 8, 9)}, who, cases)
        assert torch.equal(found[WEIGHT], rows(1, 2, 9))

    def test_a_union_is_an_owner_of_its_parts(self) -> None:
        sites = {"a": SiteInfo("a", 1, {"kidney": 1}), "b": SiteInfo("b", 2, {"kidney_left": 2})}
        who = Federation(Vocabulary(["kidney_left", "kidney_right"]), sites)
        answers = Answers({"a": {WEIGHT: rows(0, 3, 5)}, "b": {WEIGHT: rows(0, 6, 6)}})
        found = owner_rows(answers, {WEIGHT: rows(0, 0, 0)}, who, cases)
        assert torch.equal(found[WEIGHT], rows(0, 5, 5))

    def test_networks_with_parts_of_single_organs_have_no_rows(self) -> None:
        """The output that organs' encoders share has two rows: the organ and its tumour."""
        who = federation(a=("liver",), b=("spleen",))
        weights = {WEIGHT: rows(0, 0), "encoders.liver.x": rows(0)}
        assert owner_rows(Answers({"a": {WEIGHT: rows(1, 2)}}), weights, who, cases) == {}


class TestExtrapolation:
    def test_sites_that_agree_get_the_mean(self) -> None:
        old = {"w": torch.zeros(2)}
        answers = Answers({site: {"w": torch.tensor([3.0, 4.0])} for site in "ab"})
        assert extrapolation(answers, old, answers.mean(cases)) == 1.0

    def test_three_at_right_angles_go_half_as_far_again(self) -> None:
        """‖Δ‖² = 1, ‖mean‖² = 1/3: η = 1 / (2/3)."""
        old = {"w": torch.ones(3)}
        answers = Answers({site: {"w": torch.ones(3) + torch.eye(3)[i]} for i, site in enumerate("abc")})
        assert extrapolation(answers, old, answers.mean(lambda site, key: 1.0)) == pytest.approx(1.5)

    def test_never_farther_than_a_site(self) -> None:
        """All but opposite, p = 1/3 and 2/3: ‖mean‖² = 1/9, FedExP's step 4.5; but 3 · 1/3 is as far as sites go."""
        answers = Answers({"a": {"w": torch.tensor([1.0, 0.0])}, "b": {"w": torch.tensor([-1.0, 0.0])}})
        assert extrapolation(answers, {"w": torch.zeros(2)}, answers.mean(cases)) == pytest.approx(3)

    def test_one_site_does_not_choose_the_step(self) -> None:
        """Two of three agree; what the third claims to have moved plays no part, but for the mean itself."""
        answers = Answers({site: {"w": torch.tensor([x])} for site, x in (("a", 1.0), ("b", 1.0), ("c", -100.0))})
        means = {"w": torch.tensor([1.0])}  # as a robust aggregation has it
        assert extrapolation(answers, {"w": torch.zeros(1)}, means) == 1.0

    def test_nothing_moved(self) -> None:
        answers = Answers({"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(1)}})
        assert extrapolation(answers, {"w": torch.ones(1)}, answers.mean(cases)) == 1.0

    def test_a_step_beyond_the_mean(self) -> None:
        found = stepped({"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}, 1.5)
        assert torch.equal(found["w"], torch.tensor([4.0]))

    def test_what_one_site_trains_alone_is_not_extrapolated(self) -> None:
        shared = {"w": torch.zeros(1), "norm.running_var": torch.ones(1), "count": torch.ones(1, dtype=torch.int64)}
        answers = Answers({"a": {**shared, "own": torch.zeros(1)}, "b": shared})
        assert shared_keys(answers, answers.mean(cases)) == ["w"]


class TestServer:
    def rule(self, **settings: object) -> ServerRule:
        weights = {WEIGHT: rows(0, 0, 0), "w": torch.zeros(2)}
        return FedAvg.Server(FedAvgConfig(**settings), federation(a=("liver",), b=("spleen",)), weights)

    @property
    def answers(self) -> Answers:
        return Answers(
            {
                "a": {WEIGHT: rows(3, 3, 3), "w": torch.tensor([3.0, 0.0])},
                "b": {WEIGHT: rows(6, 6, 6), "w": torch.tensor([0.0, 3.0])},
            }
        )

    def test_the_plain_mean(self) -> None:
        rule = self.rule(server_step=1, organ_parts="everyone")
        rule.aggregate(self.answers)
        assert torch.equal(rule.weights[WEIGHT], rows(5, 5, 5))
        assert torch.equal(rule.weights["w"], torch.tensor([1.0, 2.0]))

    def test_fedexp_moves_what_is_shared_and_leaves_rows_to_owners(self) -> None:
        rule = self.rule(weighting="uniform", server_step=2)
        rule.aggregate(self.answers)
        assert torch.equal(rule.weights[WEIGHT], rows(4.5, 3, 6))
        assert torch.equal(rule.weights["w"], torch.tensor([3.0, 3.0]))

    def test_fedexp_is_the_default(self) -> None:
        rule = self.rule(weighting="uniform")
        rule.aggregate(self.answers)
        # ‖Δ‖² = 9 each, ‖mean‖² = 4.5: η = 9 / 9 = 1.
        assert torch.equal(rule.weights["w"], torch.tensor([1.5, 1.5]))
        apart = Answers({**self.answers.answers, "b": {WEIGHT: rows(6, 6, 6), "w": torch.tensor([-2.0, 0.0])}})
        rule = self.rule(weighting="uniform")
        rule.aggregate(apart)
        # ‖Δ‖² = 9 and 4, mean 0.5: as far as the sites went, √6.5.
        assert rule.weights["w"].tolist() == pytest.approx([6.5**0.5, 0.0])
