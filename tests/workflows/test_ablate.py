"""Which runs a method's module table needs, and what is refused before any of them trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from panorgan.config import Experiment
from panorgan.errors import ConfigError
from panorgan.methods.flkd import FLKD
from panorgan.methods.registry import methods
from panorgan.methods.shared.ablation import AblationRow, all_modules
from panorgan.workflows.ablate import plan_ablation

Tiny = Callable[..., Experiment]


@pytest.fixture
def flkd(tiny: Tiny) -> Experiment:
    return tiny(method={"name": "flkd", "n_sampled_teachers": 2, "global_weight": 0.5})


def test_rows_become_runs(flkd: Experiment) -> None:
    """The experiment's own settings hold in every row, but for the switches of that row."""
    ablation = plan_ablation(flkd, seeds="1,0")
    plan = ablation.plan
    assert (ablation.method, ablation.modules, plan.reference) == ("flkd", ("global KD", "local KD"), "no KD")
    assert plan.labels == ("no KD", "global KD", "local KD", "both")
    assert [run.seed for run in plan.runs] == [1] * 4 + [0] * 4
    assert plan.runs[1].folder.path == Path("runs/tiny-ablate-flkd/global_KD/seed-1")
    weights = [[run.experiment.method.get(f"{kd}_weight", 1) for kd in ("global", "local")] for run in plan.runs[:4]]
    assert weights == [[0, 0], [0.5, 0], [0, 1], [0.5, 1]]
    assert {run.experiment.method["n_sampled_teachers"] for run in plan.runs} == {2}


def test_every_row_delivers_its_last_round(flkd: Experiment) -> None:
    """The best round may lie before a module begins: rows would deliver one and the same model."""
    assert flkd.training.select == "best"
    runs = plan_ablation(flkd, seeds="0,1").plan.runs
    assert {run.experiment.training.select for run in runs} == {"last"}


def test_rows_may_be_chosen_in_any_order_and_case(flkd: Experiment) -> None:
    ablation = plan_ablation(flkd, rows="BOTH, global kd", seeds="0", reference="both", folder=Path("here"))
    assert [row.label for row in ablation.rows] == ["global KD", "both"]  # in the table's order
    assert ablation.plan.reference == "both"
    assert plan_ablation(flkd, rows="local KD", seeds="0").modules == ("local KD",)


def test_the_table_of_another_method_than_the_experiments(tiny: Tiny) -> None:
    experiment = tiny(method={"name": "fedprox", "mu": 0.3})
    plan = plan_ablation(experiment, method="flkd", seeds="0").plan
    assert {run.experiment.method["name"] for run in plan.runs} == {"flkd"}
    assert plan.folder == Path("runs/tiny-ablate-flkd")


def test_a_row_may_be_another_method(flkd: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no form of this one, so it is not the reference unless requested."""
    monkeypatch.setattr(FLKD, "ablation", (AblationRow("SOLO", (), method="solo"), *FLKD.ablation))
    plan = plan_ablation(flkd, seeds="0").plan
    assert plan.reference == "no KD"
    assert plan.runs[0].experiment.method["name"] == "solo"
    assert "n_sampled_teachers" not in plan.runs[0].experiment.method  # settings of flkd are none of its own
    assert plan_ablation(flkd, seeds="0", reference="solo").plan.reference == "SOLO"
    assert plan_ablation(flkd, rows="SOLO", seeds="0").plan.reference == "SOLO"


@pytest.mark.parametrize(
    ("options", "code", "names", "where"),
    [
        ({"method": "fedavg"}, "no-ablation-table", "flkd", "--method"),
        ({"rows": "bothh"}, "unknown-row", "'both'", "--rows"),
        ({"rows": "bothh"}, "unknown-row", "no KD, global KD, local KD, both", "--rows"),
        ({"rows": " , "}, "no-row", "no KD, global KD, local KD, both", "--rows"),
        ({"rows": "both", "reference": "no KD"}, "unknown-row", "'no KD'", "--reference"),
        ({"seeds": "x"}, "seeds-not-understood", "'x'", "--seeds"),
    ],
)
def test_what_is_refused(flkd: Experiment, options: dict[str, str], code: str, names: str, where: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_ablation(flkd, **options)
    assert error.value.code == code
    assert names in str(error.value)
    assert error.value.where == where


def test_a_method_that_does_not_exist(flkd: Experiment) -> None:
    with pytest.raises(ConfigError) as error:
        plan_ablation(flkd, method="flkdd")
    assert "'flkd'" in error.value.why
    assert error.value.where == "method.name"


def test_a_switch_in_the_experiment_that_makes_rows_equal(tiny: Tiny) -> None:
    """Otherwise two rows would train the same thing for hours and show it as an effect of nothing."""
    experiment = tiny(method={"name": "flkd", "local_weight": 0})
    with pytest.raises(ConfigError) as error:
        plan_ablation(experiment)
    assert error.value.code == "same-experiment"
    assert "'no KD' and 'local KD'" in error.value.what


def test_a_setting_that_the_method_does_not_have(flkd: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FLKD, "ablation", (AblationRow("odd", (), {"globl_weight": 0}),))
    with pytest.raises(ConfigError, match="'global_weight'") as error:
        plan_ablation(flkd)
    assert "--rows odd" in error.value.where


@pytest.mark.parametrize("label", ["", " PL", "PL,aRCE"])
def test_names_that_no_row_can_have(label: str) -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        AblationRow(label, ())


def test_modules_in_the_order_in_which_rows_bring_them_in() -> None:
    rows = [AblationRow("0", ()), AblationRow("1", ("b",)), AblationRow("2", ("b", "c")), AblationRow("3", ("a", "c"))]
    assert all_modules(rows) == ("b", "c", "a")


@pytest.mark.parametrize("name", [name for name, method in methods().items() if method.ablation])
def test_every_declared_table_can_be_run(tiny: Tiny, name: str) -> None:
    """Settings exist, no two rows are the same, and the last row has every module on."""
    table = methods()[name].ablation
    ablation = plan_ablation(tiny(), method=name)
    assert len(ablation.plan.runs) == 3 * len(table)
    assert set(table[-1].modules) == set(ablation.modules)
    assert len(table[0].modules) == min(len(row.modules) for row in table)
