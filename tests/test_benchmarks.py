"""Benchmarks must run: one that is never run breaks unnoticed. What they measure is no matter for a test."""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from panorgan import load_experiment
from panorgan.data.splits import split_cases
from panorgan.workflows.compare import plan_comparison, run_missing

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def loaded(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # a dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def step_cost(monkeypatch):
    return loaded("step_cost", monkeypatch)


def test_the_results_page_is_that_of_the_results(monkeypatch):
    written = (BENCHMARKS.parent / "docs" / "results.md").read_text()
    command = "python benchmarks/results_page.py > docs/results.md"
    assert written == loaded("results_page", monkeypatch).page(), f"docs/results.md is stale; write it anew: {command}"


def test_the_results_page_has_rows_of_one_seed_of_other_hospitals_alone_and_of_what_nobody_found(monkeypatch):
    """What is not defined is null in a comparison's file: the spread of one seed, a distance where all was missed."""
    row = loaded("results_page", monkeypatch)._row
    place = {"method": "flkd", "organ": "all", "place": "federation"}
    one_seed = {**place, "mean": 0.0, "sd": None, "p_holm": None}
    nothing = {**place, "mean": None, "sd": None, "missed": 3}
    found = row({"reference": "fedavg", "figures": [one_seed], "distances": [nothing]}, "flkd")
    assert (found["Dice"], found["ASSD, mm"], found["p"]) == ("0.000", "(3 missed)", "")
    outside = {**place, "place": "external", "mean": 0.5, "sd": 0.25, "p_holm": 0.5}
    found = row({"reference": "fedavg", "figures": [outside]}, "flkd")
    assert (found["Dice"], found["external"], found["ASSD, mm"]) == ("", "0.500", "")


def test_the_results_page_tells_organs_one_by_one_as_papers_on_the_heart_do(monkeypatch):
    place = {"method": "solo", "place": "federation"}
    figures = [{**place, "organ": organ, "mean": mean} for organ, mean in (("heart_myocardium", 0.5), ("all", 0.625))]
    distances = [{**place, "organ": "heart_myocardium", "mean": None}, {**place, "organ": "all", "mean": 2.0}]
    comparison = {"methods": ["solo"], "figures": figures, "distances": distances}
    header, _, row = loaded("results_page", monkeypatch)._by_organ(comparison).splitlines()
    assert header == "| method | Dice %, myocardium | Dice %, mean | ASSD mm, myocardium | ASSD mm, mean |"
    assert row == "| solo | 50.00 | 62.50 |  | 2.00 |"


def test_the_first_table_has_the_worst_organ_and_marks_the_best_without_pooling(monkeypatch):
    overview = loaded("results_overview", monkeypatch)
    figures = [
        {"method": method, "place": "federation", "organ": organ, "mean": mean, "seeds": 3}
        for method, means in {
            "fedavg_heads": {"all": 0.7004, "liver": 0.9, "kidney_left": 0.5},
            "flkd": {"all": 0.75, "liver": 0.8, "kidney_left": 0.7},
            "flkd_local": {"all": 0.8, "liver": 0.8, "kidney_left": 0.8},
            "central_full": {"all": 0.9, "liver": 0.9, "kidney_left": 0.9},
        }.items()
        for organ, mean in means.items()
    ]
    comparison = {"methods": ["fedavg_heads", "flkd", "flkd_local", "central_full"], "figures": figures}
    monkeypatch.setattr(overview, "read", lambda name: {"comparison": comparison})
    row = dict(zip(("", *overview.METHODS), overview._row(overview.Row("phantom", "5 × 5", "file")), strict=True))
    assert row[""] == "phantom<br><small>5 × 5, 3 seeds</small>"
    assert row["a part per organ"] == "0.700<br><small>left kidney 0.50</small>"
    assert row["flkd"] == "**0.750**<br><small>left kidney 0.70</small>"
    assert row["central_full"].startswith("0.900<br>")
    assert row["solo"] == ""
    comparison["methods"][1] = figures[3]["method"] = figures[4]["method"] = figures[5]["method"] = "a new one"
    with pytest.raises(ValueError, match="a new one"):
        overview._row(overview.Row("phantom", "5 × 5", "file"))


def test_the_first_table_marks_nothing_where_methods_have_different_seeds(monkeypatch):
    overview = loaded("results_overview", monkeypatch)
    methods = {
        "solo": {"seeds": {"0": {"mean": 0.8}, "1": {"mean": 0.9}}},
        "fedavg": {"seeds": {"0": {"mean": 0.9}}},
    }
    monkeypatch.setattr(overview, "read", lambda name: {"sets": {"CHAOS": methods}})
    _, solo, fedavg, *_ = overview._row(overview.Row("CHAOS", "", "file", "CHAOS"))
    assert (solo, fedavg) == ("0.850", "0.900<br><small>1 seed</small>")


def test_the_table_of_methods_has_the_best_first_and_gaps_in_their_places(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    table_of_methods = loaded("results_methods", monkeypatch).table_of_methods

    def method(mean, **more):
        return {"seeds": {"0": {"mean": mean, "nsd": 0.5}, "1": {"mean": mean + 0.1, "nsd": 0.7}}, **more}

    worst = {"organ": "spleen", "seed": "1", "ratio": 0.9}
    gap = {"inside": {"closed": 0.4, "low": 0.1, "high": 0.6}}
    sets = {
        "hard_3": {"methods": {"solo": method(0.7), "fedavg": method(0.8, worst_organ=worst, gap=gap)}},
        "chaos": {"methods": {"solo": method(0.6), "moon": method(0.9), "fedavg": method(0.5, bytes_per_round=2.5e6)}},
    }
    lines = [line.split(" | ") for line in table_of_methods(sets, {"fedavg": 1.0}).splitlines()]
    assert [line[0] for line in lines[2:]] == ["| `fedavg`", "| `solo`", "| `moon`"]
    assert lines[2][1:] == [
        "0.850 / 0.60<br><small>gap 40%</small><br><small>spleen 0.90</small>",
        "0.550 / 0.60",
        "1.00",
        "2.5 |",
    ]
    assert lines[4][1] == ""


def test_pooled_methods_send_nothing_and_unmeasured_steps_have_no_column(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    table_of_methods = loaded("results_methods", monkeypatch).table_of_methods
    one = {"seeds": {"0": {"mean": 0.8, "nsd": 0.5}}, "bytes_per_round": 2e6}
    head, _, *lines = table_of_methods({"chaos": {"methods": {"central_full": one, "fedavg": one}}}, {}).splitlines()
    assert head == "| method | CHAOS | MB per round |"
    assert [line.split("|")[3].strip() for line in lines] == ["", "2.0"]


def test_step_cost_runs(step_cost):
    shape = {"patch": [16, 16, 16], "features": [4, 8], "mask_weights": 1000}
    shape |= {"slice": [16, 16], "slice_features": [4, 8, 8], "slice_batch": 2}
    tiny = Namespace(only=None, device="cpu", steps=1, repeats=1, bfloat16=False, json=True, **shape)
    threads = torch.get_num_threads()
    result = step_cost.measure(tiny)
    assert torch.get_num_threads() == threads
    for label, entry in step_cost.CONTENDERS.items():
        assert result[label] > 0
        assert result[entry.reference] == 1.0
    assert result["inference_all_organs"] > 0
    assert result["mask_seconds"].keys() == {"largest", "extra"}
    sent = result["bytes_per_round"]
    # One bit per weight comes and goes with new masks. This network is so small that headers weigh more.
    assert sent["fedavg"] < sent["ufps_susam"] <= sent["ufps_susam_new_masks"]
    # Sixteen tokens: two maps of 16 slices come and go, in 16 bit; the transformer besides.
    traffic = result["fediod_megabytes"]
    assert traffic["sent"] - traffic["sent_multidecoder"] >= 2 * 16 * 16 * 16 * 2 / 1e6
    assert 0 < result["after_round"]["share_of_round"] < 1
    assert result["bytes_ufps_susam"] == round(sent["ufps_susam_new_masks"] / sent["fedavg"], 4)


def test_a_turn_holds_every_kind_of_round(step_cost):
    plain = step_cost.CONTENDERS["fedavg"]
    assert plain.turn(0) == [(1, 1.0)]
    assert plain.turn(3) == [(4, 1.0)]
    late = step_cost.CONTENDERS["ufps_susam"]
    # Masks are made in round 6001 of 10 000 and every five rounds from there on: where r mod 5 = 1.
    assert late.turn(0) == [(6001, 0.2), (6002, 0.8)]
    assert late.turn(1) == [(6006, 0.2), (6007, 0.8)]


def test_fuzzing_finds_faults_and_keeps_the_messages(monkeypatch, tmp_path):
    """With a reader that breaks on some messages: a fuzzer that cannot fail proves nothing."""
    monkeypatch.syspath_prepend(BENCHMARKS.parent / "tests" / "helpers")
    module = loaded("fuzz_messages", monkeypatch)
    clean = module.fuzz(200, 1, 0.1, tmp_path / "faults")
    assert (clean["messages"], clean["faults"]) == (200, {})
    assert clean["taken"]
    assert not (tmp_path / "faults").exists()

    def break_on_short_ones(content: bytes) -> bool:
        return bool(1 / len(content) if len(content) > 100 else 1 / 0)

    monkeypatch.setattr(module, "examine", break_on_short_ones)
    broken = module.fuzz(200, 1, 0.0, tmp_path / "faults")
    assert broken["faults"]["ZeroDivisionError"] == len(list((tmp_path / "faults").iterdir())) > 0


def test_the_quality_table_finds_the_organ_that_a_method_loses(monkeypatch, tmp_path):
    quality = loaded("quality", monkeypatch)

    def write(method, seed, liver, spleen):
        run = tmp_path / method / f"seed-{seed}"
        (run / "model").mkdir(parents=True)
        (run / "model" / "model.json").write_text('{"round": 30}')
        rows = [f"test,a,c1,liver,{liver},0.5", f"test,a,c2,liver,{liver},0.7", f"test,a,c1,spleen,{spleen},0.8"]
        lines = ["split,site,case,organ,dice,nsd", *rows, "external,b,c3,liver,0.5,nan"]
        (run / "metrics.csv").write_text("\n".join(lines))

    for seed, lost in ((0, 0.8), (1, 0.2)):
        write("solo", seed, 0.8, 0.8)
        write("fedavg", seed, 0.9, lost)
        write("ufps", seed, 0.9, 0.9)  # comes after solo
        write("central_full", seed, 1.0, 1.0)
    found = quality.collect(tmp_path)
    assert found["ufps"]["difference"] == pytest.approx(0.1)
    assert found["ufps"]["gap"]["inside"] == {"closed": 0.5, "low": 0.5, "high": 0.5}
    assert found["central_full"]["gap"] == {}
    fedavg = found["fedavg"]
    assert fedavg["seeds"]["0"] == {
        "mean": 0.85,
        "nsd": 0.7,
        "organs": {"liver": 0.9, "spleen": 0.8},
        "delivered_round": 30,
        "external": 0.5,
    }
    assert fedavg["worst_organ"] == {"organ": "spleen", "seed": "1", "ratio": 0.25}
    assert fedavg["difference"] == pytest.approx((0.05 - 0.25) / 2)
    assert "spleen 0.25" in quality.table(found)


def test_the_quality_table_knows_patients_and_payload_from_the_plan(tiny, tmp_path, monkeypatch):
    quality = loaded("quality", monkeypatch)
    plan = plan_comparison(tiny(training={"rounds": 1}), "solo,fedavg", "0", "solo", tmp_path)
    run_missing(plan, lambda *_: nullcontext(lambda event: None))
    found = quality.collect(tmp_path, plan)
    fedavg = found["fedavg"]
    assert fedavg["bytes_per_round"] > 4 * 4 * fedavg["parameters"], "two sites, both ways, four bytes each"
    assert found["solo"]["parameters"] > fedavg["parameters"], "a network per site"


def test_bits_are_taken_of_one_method_and_kept_of_all(monkeypatch, tmp_path):
    """Their values are those of one kind of processor, and no matter for a test."""
    bits = loaded("bits", monkeypatch)
    found = bits.bits_of("fedavg", tmp_path)
    assert {name: len(value) for name, value in found.items()} == {"weights": 64, "metrics": 64}
    assert set(json.loads(bits.RESULTS.read_text())["methods"]) == set(bits.methods())


def test_bits_of_one_method_are_written_beside_those_of_the_others(monkeypatch, tmp_path):
    bits = loaded("bits", monkeypatch)
    kept = {
        "torch": torch.__version__,
        "processor": platform.machine(),
        "methods": {"fedavg": {"weights": "a"}, "solo": {"weights": "b"}},
    }
    monkeypatch.setattr(bits, "RESULTS", tmp_path / "bits.json")
    bits.RESULTS.write_text(json.dumps(kept))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(bits, "bits_of", lambda name, folder: {"weights": "c"})
    monkeypatch.setattr(sys, "argv", ["bits.py", "--write", "--only", "fedprox", "solo"])
    assert bits.main() == 0
    written = json.loads(bits.RESULTS.read_text())["methods"]
    assert list(written.items()) == [
        ("fedavg", {"weights": "a"}),
        ("fedprox", {"weights": "c"}),
        ("solo", {"weights": "c"}),
    ]
    bits.RESULTS.write_text(json.dumps({**kept, "torch": "another"}))
    with pytest.raises(SystemExit):  # hashes of two versions do not go into one file
        bits.main()


def test_bits_tell_values_shapes_types_and_names_apart(monkeypatch):
    hash_of = loaded("bits", monkeypatch).hash_of_tensors
    plain = {"b": torch.zeros(4), "a": torch.ones(2, 2)}
    others = [
        {**plain, "b": torch.zeros(2, 2)},
        {**plain, "b": torch.zeros(4, dtype=torch.int32)},
        {"c": torch.zeros(4), "a": torch.ones(2, 2)},
        {**plain, "a": torch.eye(2)},
    ]
    assert hash_of(dict(reversed(plain.items()))) == hash_of(plain)
    assert len({hash_of(tensors) for tensors in [plain, *others]}) == 5


def test_accelerators_measures_a_step_in_each_way(monkeypatch, tmp_path):
    small = ["--device", "cpu", "--patch", "8", "8", "8", "--features", "4", "8", "--steps", "1", "--repeats", "1"]
    words = ["accelerators.py", "--ways", "plain", "--only", "fedavg", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", [*words, "--", *small, "--mask-weights", "100"])
    loaded("accelerators", monkeypatch).main()
    found = json.loads((tmp_path / "found.json").read_text())["milliseconds"]
    assert found.keys() == {"plain"}
    assert found["plain"]["fedavg"] > 0


def test_the_phantom_federations_are_as_written_and_large_enough(monkeypatch):
    benchmark = loaded("phantom_benchmark", monkeypatch)
    for name, labels in benchmark.FEDERATIONS.items():
        file = BENCHMARKS / "experiments" / f"{name}.yaml"
        assert yaml.safe_load(file.read_text()) == benchmark.experiment(name), (
            "stale; write them anew: python benchmarks/phantom_benchmark.py"
        )
        experiment = load_experiment(file)
        shares = experiment.splits
        inside = [site for site in experiment.phantom.sites if not site.external]
        counts = {tuple(len(split) for split in _split_of(site.cases, shares).values()) for site in inside}
        ((train, validation, test),) = counts
        assert (train, validation) == (8, 2)
        assert test * len(inside) + 40 >= 200
        assert {organ for site in inside for organ in site.annotated} == set(benchmark.ORGANS)
        assert len(inside) == len(labels)


def _split_of(count, settings):
    return split_cases([SimpleNamespace(site="a", patient=str(n), id=str(n)) for n in range(count)], settings, 0)
