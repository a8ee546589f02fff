"""Logging into a folder for MLflow: what is written, once, and never over a network."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from live_runs import SCORES

from panorgan.checksums import sealed_json
from panorgan.config import Experiment
from panorgan.errors import ConfigError
from panorgan.federation.events import Event, Listener
from panorgan.workflows.execute import train
from panorgan.workflows.mlflow_log import RUN_TAG, mlflow_listener, parameters, round_metrics
from panorgan.workflows.run import Run

ROUND = {
    "number": 1, "stage": "train", "round": 1, "rounds": 3, "total": 3,
    "sites": {"north": {"loss": 0.5, "cases": 3.0}, "south": {"cases": 2.0}}, "server": {"step": 1.5},
    "validation": SCORES, "best": None, "bytes_sent": 100, "bytes_received": 60,
    "seconds": {"sites": 9.0, "aggregate": 1.0},
}  # fmt: skip


@dataclass
class Store:
    """Stands in for MLflow's client: one experiment, and what was logged of its runs."""

    runs: list[Any] = field(default_factory=list)
    metrics: list[tuple[str, float, int]] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    artefacts: list[str] = field(default_factory=list)
    full: bool = False

    def get_experiment_by_name(self, name: str) -> Any:
        return None

    def create_experiment(self, name: str) -> str:
        return "1"

    def search_runs(self, places: list[str], filter_string: str) -> list[Any]:
        return [run for run in self.runs if f"'{run.tags[RUN_TAG]}'" in filter_string]

    def create_run(self, place: str, run_name: str, tags: dict[str, str]) -> Any:
        self.runs.append(SimpleNamespace(info=SimpleNamespace(run_id=str(len(self.runs))), tags=tags, name=run_name))
        return self.runs[-1]

    def update_run(self, id: str, status: str) -> None:
        assert status == "RUNNING"

    def get_metric_history(self, id: str, key: str) -> list[Any]:
        return [SimpleNamespace(step=step) for name, _, step in self.metrics if name == key]

    def log_param(self, id: str, key: str, value: str) -> None:
        self.params[key] = value

    def log_metric(self, id: str, key: str, value: float, timestamp: int, step: int) -> None:
        if self.full:
            raise OSError("No space left on device")
        self.metrics.append((key, value, step))

    def log_artifact(self, id: str, path: str) -> None:
        self.artefacts.append(Path(path).name)

    def set_terminated(self, id: str) -> None:
        self.artefacts.append("the end")


@pytest.fixture
def run(tiny: Callable[..., Experiment], tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    content = {"run": "r1", "fingerprint": "f", "experiment": tiny().as_json()}
    run.manifest_file.write_text(sealed_json(content))
    return run


def round_event(number: int) -> Event:
    return Event("round", {**ROUND, "number": number}, 5.0)


def test_the_numbers_of_a_round() -> None:
    assert round_metrics(ROUND) == {
        "loss/north": 0.5,
        "server/step": 1.5,
        "validation_dice/north/liver": 0.9,
        "validation_dice/south/spleen": 0.5,
        "validation_dice/south/kidney_left": 0.7,
        "validation_dice_mean": pytest.approx(0.75),
        "bytes/sent": 100,
        "bytes/received": 60,
        "seconds/round": 10.0,
    }


def test_settings_have_dotted_names_that_the_store_takes() -> None:
    content = {"a": {"b": 1, "c": [1, 2]}, "d:e": None, "f": {}, "long": "x" * 9999}
    found = dict(parameters(content))
    assert {key: found[key] for key in ("a.b", "a.c", "d_e", "f")} == {
        "a.b": "1", "a.c": "[1, 2]", "d_e": "None", "f": "{}"
    }  # fmt: skip
    assert len(found["long"]) == 500


def test_a_run_is_one_run_however_often_it_resumes(run: Run) -> None:
    """And a round that is repeated after a kill is logged once."""
    store = Store()
    first = mlflow_listener(run.path, run, store)
    for event in (Event("started", {}), Event("joined", {"sites": {}}), round_event(1), round_event(2)):
        first(event)
    again = mlflow_listener(run.path, run, store)
    for event in (Event("resumed", {}), round_event(2), round_event(3), round_event(3)):
        again(event)
    assert [item.tags[RUN_TAG] for item in store.runs] == ["r1"]
    assert [step for name, _, step in store.metrics if name == "loss/north"] == [1, 2, 3]
    assert store.params["training.rounds"] == "3"
    assert not [key for key in store.params if key.startswith(("sites", "phantom"))]


def test_a_full_disk_ends_the_logging_and_not_the_run(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(full=True)
    listen = mlflow_listener(run.path, run, store)
    for number in (1, 2, 3):
        listen(round_event(number))
    assert len(caplog.records) == 1
    assert store.metrics == []


def test_without_mlflow_the_run_does_not_begin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(ConfigError) as refused:
        mlflow_listener(run.path / "store", run)
    assert refused.value.code == "mlflow-missing"


def test_a_whole_run_ends_with_its_scores_and_the_card(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    store, run = Store(), Run(tmp_path / "run")
    train(tiny(training={"rounds": 1, "validate_every": 1}), run.path, listeners=(_with(store, run),))
    assert store.artefacts == ["CARD.md", "model.json", "the end"]
    final = {name: value for name, value, _ in store.metrics}
    rows = [row["dice"] for row in Run(run.path).scores.where(split="test")]
    assert final["test_dice_mean"] == pytest.approx(sum(rows) / len(rows))
    assert final["delivered_round"] == 1


def _with(store: Store, run: Run) -> Listener:
    return mlflow_listener(run.path, run, store)


def test_the_real_store_is_a_folder_and_nothing_is_sent(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    pytest.importorskip("mlflow", reason="the mlflow extra is not installed")
    tried: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: tried.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **more: tried.append(address) or [])
    for _ in range(2):  # begun, and resumed
        listen = mlflow_listener(tmp_path / "store", run)
        for event in (Event("started", {}), round_event(1), round_event(2), Event("finished", {})):
            listen(event)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "store").as_uri())
    (place,) = [found for found in client.search_experiments() if found.name == "tiny"]
    (logged,) = client.search_runs([place.experiment_id])
    assert (logged.info.status, logged.data.params["method.name"]) == ("FINISHED", "fedavg")
    assert [metric.step for metric in client.get_metric_history(logged.info.run_id, "loss/north")] == [1, 2]
    assert tried == []
