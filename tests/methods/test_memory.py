"""Remembering tensors: several rules in one class, each under its own prefix, beside what the rule below keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from panorgan.methods.base import Payload
from panorgan.methods.shared.memory import Remembers


class Below:
    """A rule with a state of its own."""

    def __init__(self, number: float = 1.0) -> None:
        self.number = number

    def state(self) -> Payload:
        return Payload({"w": torch.ones(1)}, {"number": self.number})

    def load_state(self, state: Payload) -> None:
        self.number = state.scalars["number"]


class First(Remembers):
    """Remembers one thing."""

    memory: ClassVar[Mapping[str, str]] = {"h": "first/"}


class Second(Remembers):
    """Remembers two."""

    memory: ClassVar[Mapping[str, str]] = {"m": "second/m/", "v": "second/v/"}


class Both(First, Second, Below):
    """A stack, as of pieces."""


def test_every_rule_of_a_stack_keeps_its_own():
    rule, again = Both(number=3.0), Both()
    assert (rule.h, rule.m, rule.v) == ({}, {}, {})
    assert rule.h is not again.h
    rule.h, rule.v = {"a": torch.tensor([2.0])}, {"a": torch.tensor([5.0]), "b": torch.tensor([7.0])}
    state = rule.state()
    assert {key: value.item() for key, value in state.tensors.items()} == {
        "w": 1,
        "first/a": 2,
        "second/v/a": 5,
        "second/v/b": 7,
    }
    again.load_state(state)
    assert again.number == 3.0
    assert {key: value.item() for key, value in again.v.items()} == {"a": 5, "b": 7}
    assert (again.h.keys(), again.m) == ({"a"}, {})
