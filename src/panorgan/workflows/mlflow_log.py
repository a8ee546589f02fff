"""A run in a folder for MLflow, besides TensorBoard: parameters, losses and Dice per round, final scores, the card.

MLflow is optional, and stays on this machine: its store is a folder, and its report of use to its makers is off.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from panorgan.errors import ConfigError
from panorgan.evaluation.statistics import organ_site_table
from panorgan.federation.events import Event, Listener
from panorgan.workflows.event_words import mean_validation
from panorgan.workflows.run import Run

log = logging.getLogger(__name__)

RUN_TAG = "panorgan.run"
"""Tag with the id in a run's manifest: a resumed run goes on in the same MLflow run."""
_STEPS = "seconds/round"  # logged in every round
_LONGEST_VALUE = 500
_UNFIT = re.compile(r"[^\w./ -]", re.ASCII)


def mlflow_listener(folder: Path, run: Run, client: Any = None) -> Listener:
    """A listener that writes events into the store in a folder. `client` stands in for MLflow's own in tests."""
    return _MlflowLog(client or _client(folder), run)


def _client(folder: Path) -> Any:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # it would send a report of its use over the network
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions want a database
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise ConfigError(
            "MLflow is not installed.",
            code="mlflow-missing",
            why="--mlflow, or 'mlflow' in coordinator.yaml, asks for it",
            fix="Install panorgan's wheel with its extra: pip install './panorgan-VERSION-py3-none-any.whl[mlflow]'",
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    return MlflowClient(tracking_uri=folder.resolve().as_uri())


class _MlflowLog:
    """One run. A store that cannot be written (a full disk) ends the logging, not the training."""

    def __init__(self, client: Any, run: Run) -> None:
        self._client, self._run = client, run
        self._id = ""
        self._done: set[int] = set()
        self._broken = False

    def __call__(self, event: Event) -> None:
        if self._broken or event.kind not in ("started", "resumed", "round", "finished"):
            return
        try:
            self._write(event)
        except Exception as error:
            self._broken = True
            log.warning("nothing more is written for MLflow: %s", error)

    def _write(self, event: Event) -> None:
        if not self._id:
            self._open()
        if event.kind == "round" and event.facts["number"] not in self._done:
            self._done.add(event.facts["number"])
            self._metrics(round_metrics(event.facts), event.time, event.facts["number"])
        elif event.kind == "finished":
            self._finish(event)

    def _open(self) -> None:
        """The MLflow run of this run: a new one, or the one of before it was interrupted."""
        manifest = Run(self._run.path).manifest
        experiment = manifest["experiment"]
        name = _key(experiment["name"])
        known = self._client.get_experiment_by_name(name)
        place = known.experiment_id if known is not None else self._client.create_experiment(name)
        found = self._client.search_runs([place], filter_string=f"tags.`{RUN_TAG}` = '{manifest['run']}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            self._done = {metric.step for metric in self._client.get_metric_history(self._id, _STEPS)}
            return
        title = f"{experiment['method']['name']}, seed {experiment['seed']}"
        tags = {RUN_TAG: manifest["run"], "panorgan.fingerprint": manifest["fingerprint"]}
        self._id = self._client.create_run(place, run_name=title, tags=tags).info.run_id
        # Folders of sites are paths on this machine, which are useless for comparing runs.
        for key, value in parameters({k: v for k, v in experiment.items() if k not in ("sites", "phantom")}):
            self._client.log_param(self._id, key, value)

    def _metrics(self, values: Mapping[str, float], time: float, step: int) -> None:
        for key, value in values.items():
            self._client.log_metric(self._id, _key(key), value, timestamp=int(time * 1000), step=step)

    def _finish(self, event: Event) -> None:
        run = Run(self._run.path)
        self._metrics(final_metrics(run), event.time, max(self._done, default=0))
        for path in sorted((*run.model_folder.glob("model.json"), *run.model_folder.glob("*.md"))):
            self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id)


def parameters(content: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Settings by dotted name, in the order of the experiment; folders and lists as one text."""
    if isinstance(content, Mapping) and content:
        for key, value in content.items():
            yield from parameters(value, f"{place}.{key}".lstrip("."))
    else:
        yield _key(place), str(content)[:_LONGEST_VALUE]


def round_metrics(facts: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one round."""
    values: dict[str, float] = {f"loss/{site}": own["loss"] for site, own in facts["sites"].items() if "loss" in own}
    values |= {f"server/{name}": value for name, value in facts.get("server", {}).items()}
    for site, scores in (facts.get("validation") or {}).items():
        values |= {f"validation_dice/{site}/{structure}": value for structure, value in scores.items()}
    if (mean := mean_validation(facts)) is not None:
        values["validation_dice_mean"] = mean
    values |= {"bytes/sent": facts["bytes_sent"], "bytes/received": facts["bytes_received"]}
    return {**values, _STEPS: sum(facts["seconds"].values())}


def final_metrics(run: Run) -> dict[str, float]:
    """Mean Dice of the test cases by organ, over all and outside; a federation's server has none of them."""
    values: dict[str, float] = {}
    if run.complete:
        table = organ_site_table(run.scores)
        values = {f"test_dice/{organ}": summary.mean for organ, summary in table.organs.items()}
        values |= {"test_dice_mean": table.overall.mean} if table.overall.n else {}
        values |= {"external_dice_mean": table.external.mean} if table.external.n else {}
    return {**values, **({} if run.delivered_round is None else {"delivered_round": float(run.delivered_round)})}


def _key(name: str) -> str:
    """A name that MLflow takes for a parameter, a metric or an experiment."""
    return _UNFIT.sub("_", name).replace("..", "__") or "_"
