"""Benchmarks must run: one that nobody starts breaks unnoticed. What they measure is no matter for a test."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path

import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_step_cost_runs():
    spec = importlib.util.spec_from_file_location("step_cost", BENCHMARKS / "step_cost.py")
    assert spec
    assert spec.loader
    step_cost = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(step_cost)
    tiny = Namespace(
        only=None, device="cpu", patch=[16, 16, 16], features=[4, 8], steps=1, repeats=1, bfloat16=False, json=True
    )
    threads = torch.get_num_threads()
    result = step_cost.measure(tiny)
    assert torch.get_num_threads() == threads
    for label, (reference, _, _) in step_cost.CONTENDERS.items():
        assert result[label] > 0
        assert result[reference] == 1.0
    assert result["inference_all_organs"] > 0
