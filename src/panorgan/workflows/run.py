"""A run: one execution, one folder. The paths of its files, and their content, read on demand."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panorgan.anatomy import Vocabulary, declare_finished
from panorgan.checksums import read_json
from panorgan.config import Experiment, parse_experiment
from panorgan.errors import RunError
from panorgan.evaluation.metrics import is_missed
from panorgan.federation.events import Event, read_events
from panorgan.workflows.run_log import RoundRecord, SiteRecord, is_ordinary, learning_curves, read_rounds, read_sites
from panorgan.workflows.tables import Table, read_metrics

if TYPE_CHECKING:
    from panorgan.workflows.model_bundle import Model


class Run:
    """A run folder, finished or not.

    Files are read on first use, and once: `Run(run.path)` reads again.

    Parameters
    ----------
    path : the folder that `train` wrote, or is to write.

    Examples
    --------
    >>> run = panorgan.Run("runs/abdomen")
    >>> run.scores.where(organ="liver", split="test").column("dice")
    [0.91, 0.94]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __reduce__(self) -> tuple[type[Run], tuple[Path]]:
        return Run, (self.path,)  # another process reads the files itself

    # -- content ---------------------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether the folder holds a run."""
        return self.manifest_file.is_file()

    @property
    def complete(self) -> bool:
        """Whether the run has been trained and scored."""
        return self.scores_file.is_file()

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The record of the run: settings, versions, data, hardware."""
        try:
            content: dict[str, Any] = read_json(self.manifest_file.read_bytes())
            return content
        except FileNotFoundError as error:
            raise self._not_a_run() from error
        except ValueError as error:
            raise RunError(
                "manifest.json is damaged.",
                code="manifest-damaged",
                where=str(self.manifest_file),
                why=str(error),
                fix="Restore it from a backup, or start a new run in another folder.",
            ) from error

    def _not_a_run(self) -> RunError:
        """Names the runs in it, where it is the folder of a comparison."""
        runs = [str(file.parent.relative_to(self.path)) for file in sorted(self.path.glob("*/*/manifest.json"))]
        holds = f"; it holds the runs {', '.join(runs[:4])}{' …' * (len(runs) > 4)}" if runs else ""
        return RunError(
            "This is not a run folder.",
            code="not-a-run",
            where=str(self.path),
            why=f"it has no manifest.json{holds}",
            fix="Point to one of them; 'panorgan compare … --report-only' writes the page of a comparison again."
            if runs
            else "Point to a folder that 'panorgan train' or 'panorgan demo' wrote.",
        )

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment, parsed again: settings added since have their defaults."""
        with self._parsing():
            content = self.manifest["experiment"]
        return parse_experiment(content, str(self.manifest_file))

    @cached_property
    def scores(self) -> Table:
        """One row per test case and organ: split, site, case, organ, every metric, and `missed`.

        `missed` is true where the organ or its prediction is empty: distances are undefined exactly then.
        """
        return Table({**row, "missed": is_missed(row)} for row in read_metrics(self.scores_file))

    @cached_property
    def events(self) -> Table:
        """The history: one row per line of the log, with `time` (seconds since 1970) and `event`."""
        return Table({"time": event.time, "event": event.kind, **event.facts} for event in self._log)

    @cached_property
    def rounds(self) -> tuple[RoundRecord, ...]:
        """Every round of training, by number."""
        with self._parsing():
            return read_rounds(self._log)

    @cached_property
    def curves(self) -> Table:
        """One row per round and site: `loss`, mean validation `dice`, and `dice_<structure>` where it was validated."""
        return learning_curves(self.rounds)

    @cached_property
    def notable_events(self) -> tuple[Event, ...]:
        """What does not happen in every run: refusals, newcomers, notices, damage."""
        return tuple(event for event in self._log if not is_ordinary(event))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The organs that the federation segments."""
        with self._parsing():
            declare_finished(self.manifest["experiment"].get("organs"))
            return Vocabulary(self.manifest["experiment"]["vocabulary"])

    @cached_property
    def organs(self) -> tuple[str, ...]:
        """The vocabulary in its order, then scored structures that are unions of it (such as both kidneys)."""
        return (*self.vocabulary, *sorted({row["organ"] for row in self.scores} - set(self.vocabulary)))

    @cached_property
    def sites(self) -> tuple[SiteRecord, ...]:
        """The sites that trained, then external ones."""
        with self._parsing():
            return read_sites(self.manifest, self.vocabulary, self._log)

    @property
    def training_sites(self) -> tuple[SiteRecord, ...]:
        """The sites that trained."""
        return tuple(site for site in self.sites if not site.external)

    @property
    def external_sites(self) -> tuple[SiteRecord, ...]:
        """The sites that were only scored."""
        return tuple(site for site in self.sites if site.external)

    def labelled_itself(self, site: str, organ: str) -> bool:
        """Whether the site annotated this organ in its own training cases."""
        return any(organ in record.labelled for record in self.sites if record.name == site)

    @property
    def is_ct(self) -> bool:
        """Whether intensities are HU, so that the usual windows apply."""
        with self._parsing():
            # Older runs state it in the experiment alone.
            plan = self.manifest.get("plan") or self.manifest["experiment"].get("plan", {})
            return bool(plan.get("intensity", "window") == "window")

    @cached_property
    def model(self) -> Model:
        """The delivered model, on the best available device."""
        from panorgan.workflows.model_bundle import load_model

        return load_model(self.model_folder)

    @cached_property
    def card(self) -> Mapping[str, Any]:
        """The model's card; empty when the model was removed, because scores can be shown without it."""
        path = self.model_folder / "model.json"
        try:
            card: dict[str, Any] = read_json(path.read_bytes())
            return card
        except OSError:
            return {}
        except ValueError as error:
            raise RunError(
                "The card of this run's model is damaged.",
                code="card-damaged",
                where=str(path),
                why=str(error),
                fix="Restore the file from a backup. Without the model folder the scores can still be shown.",
            ) from error

    @property
    def delivered_round(self) -> int | None:
        """The round whose weights are in the delivered model."""
        return int(self.card["round"]) if "round" in self.card else None

    @property
    def total_rounds(self) -> int | None:
        """Rounds of all stages; None where the log has none."""
        return self.rounds[-1].number if self.rounds else None

    def baselines(self) -> dict[str, Run]:
        """Finished runs of the same experiment with other methods, by method."""
        found = sorted(path.name for path in (self.path / "beside").glob("*") if Run(path).complete)
        return {method: self.baseline(method) for method in found}

    def baseline(self, method: str) -> Run:
        """The run of the same experiment with another method."""
        return Run(self.path / "beside" / method)

    @cached_property
    def _log(self) -> tuple[Event, ...]:
        return tuple(read_events(self.events_file))

    @contextmanager
    def _parsing(self) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, AttributeError) as error:
            raise RunError(
                "The files of this run cannot be parsed.",
                code="run-not-understood",
                where=str(self.path),
                why=f"{type(error).__name__}: {error}",
                fix="They are damaged or from another panorgan version. Use the version that wrote them.",
            ) from error

    # -- paths -----------------------------------------------------------------------------------------------------

    @property
    def manifest_file(self) -> Path:
        """The record of the run: settings, versions, data, hardware."""
        return self.path / "manifest.json"

    @property
    def events_file(self) -> Path:
        """One line per event."""
        return self.path / "events.jsonl"

    @property
    def scores_file(self) -> Path:
        """One row per case and organ; written last, so its presence means that the run is complete."""
        return self.path / "metrics.csv"

    @property
    def own_models_file(self) -> Path:
        """Like the scores, for every site's own model, where the method has such models."""
        return self.path / "own_models.csv"

    @property
    def local_models_file(self) -> Path:
        """Like the scores, for every site's model of the last round before averaging, and the averaged one."""
        return self.path / "local_models.csv"

    @property
    def local_models_folder(self) -> Path:
        """The weights of those models, where the experiment keeps them."""
        return self.path / "local_models"

    @property
    def analysis_file(self) -> Path:
        """The results of `panorgan analyze`; tables and figures are in the folder `analysis` next to it."""
        return self.path / "analysis.json"

    @property
    def analysis_folder(self) -> Path:
        """Tables and figures of the analyses."""
        return self.path / "analysis"

    @property
    def model_folder(self) -> Path:
        """Weights and card of the delivered model."""
        return self.path / "model"

    @property
    def predictions_folder(self) -> Path:
        """Label maps of the scored cases, `<site>/<case>.nii.gz`."""
        return self.path / "predictions"

    @property
    def report_file(self) -> Path:
        """The report, as a page."""
        return self.path / "report.html"

    @property
    def tensorboard_folder(self) -> Path:
        """Scalars for TensorBoard."""
        return self.path / "tensorboard"

    def site_folder(self, name: str) -> Path:
        """The private files of a simulated site."""
        return self.path / "sites" / name
