"""More rounds for a run: `train --resume --set training.rounds=80` after 40."""

from __future__ import annotations

import os
import time
from typing import Any

from panorgan.checksums import sealed_json
from panorgan.config import Experiment
from panorgan.errors import RunError
from panorgan.federation.checkpoint import Checkpoints
from panorgan.federation.files import write_atomically
from panorgan.workflows.run import Run


def only_more_rounds(known: Experiment, experiment: Experiment) -> bool:
    """Whether two experiments differ only in their number of rounds, and the second has more."""
    if experiment.training.rounds <= known.training.rounds:
        return False
    training = known.training.model_copy(update={"rounds": experiment.training.rounds})
    return known.model_copy(update={"training": training}).fingerprint() == experiment.fingerprint()


def refuse_other_stages(run: Run, experiment: Experiment) -> None:
    """Refuse a method with stages around training: their share of the run is over, and their models were removed."""
    stages = experiment.build_method().stages(experiment.training.rounds)
    if len(stages) > 1:
        raise RunError(
            f"A run of {experiment.method['name']} cannot be extended.",
            code="cannot-extend",
            where=str(run.path),
            why=f"its rounds are shared out among the stages {', '.join(stage.name for stage in stages)}",
            fix=f"Begin a new run with 'training.start_from: {run.path}'.",
        )


def extend(run: Run, experiment: Experiment) -> dict[str, Any]:
    """Write the new number of rounds into the manifest, which keeps the old one; returns the event for the log.

    The scores of the shorter run are moved away: they belong to its model, and `metrics.csv` marks a run as complete.
    """
    old = run.experiment.training
    done = (Checkpoints(run.path / "checkpoints").peek() or (0, ()))[0]
    if run.scores_file.exists():
        os.replace(run.scores_file, run.path / f"metrics-{old.rounds}-rounds.csv")
    earlier = {
        "rounds": old.rounds,
        "rounds_done": done,
        "fingerprint": run.manifest["fingerprint"],
        "delivered_round": run.delivered_round,
        "until": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    manifest = {
        **run.manifest,
        "experiment": experiment.as_json(),
        "fingerprint": experiment.fingerprint(),
        "extended": [*run.manifest.get("extended", []), earlier],
    }
    write_atomically(run.manifest_file, sealed_json(manifest, indent=1), durable=True)
    return {"number": done + 1, "code": "extended", "text": in_words(old.rounds, done, experiment)}


def in_words(before: int, done: int, experiment: Experiment) -> str:
    """A sentence about how the extension affects what depends on the number of rounds."""
    training = experiment.training
    rate, rounds = training.optimizer, training.rounds
    text = f"The run is extended from {before} to {rounds} rounds; {done} are done."
    last, following = rate.rate(max(done - 1, 0) / before), rate.rate(done / rounds)
    if rate.schedule == "constant" and not rate.warmup:
        return f"{text} The learning rate stays {rate.learning_rate:g}."
    return (
        f"{text} The learning rate follows '{rate.schedule}' over {rounds} rounds from here on: about {last:.2g} in "
        f"round {done}, {following:.2g} in round {done + 1}. So the model is not that of {rounds} rounds in one run."
    )
