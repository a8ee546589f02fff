"""The layout of a run folder: one execution, one folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panorgan.checksums import read_json
from panorgan.errors import RunError


@dataclass(frozen=True)
class RunFolder:
    """Where the files of a run lie."""

    path: Path

    @property
    def manifest(self) -> Path:
        """What was run, with what, on what."""
        return self.path / "manifest.json"

    @property
    def events(self) -> Path:
        """One line per thing that happened."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One row per case and organ; written last, so its presence means that the run is complete."""
        return self.path / "metrics.csv"

    @property
    def own_models(self) -> Path:
        """Like the metrics, for every site's own model, where the method has such models."""
        return self.path / "own_models.csv"

    @property
    def local_models(self) -> Path:
        """Like the metrics, for every site's model of the last round before it was averaged, and the averaged one."""
        return self.path / "local_models.csv"

    @property
    def local_weights(self) -> Path:
        """The weights of those models, where the experiment asks for them."""
        return self.path / "local_models"

    @property
    def analysis(self) -> Path:
        """What `panorgan analyze` found; tables and figures lie in the folder `analysis` beside it."""
        return self.path / "analysis.json"

    @property
    def analysis_files(self) -> Path:
        """Tables and figures of the analyses."""
        return self.path / "analysis"

    def beside(self) -> dict[str, RunFolder]:
        """Finished runs of the same experiment with other methods, by method."""
        found = sorted(path.name for path in (self.path / "beside").glob("*") if RunFolder(path).complete)
        return {method: self.beside_method(method) for method in found}

    def beside_method(self, method: str) -> RunFolder:
        """Where the same experiment with another method lives."""
        return RunFolder(self.path / "beside" / method)

    @property
    def model(self) -> Path:
        """Weights and card of the delivered model."""
        return self.path / "model"

    @property
    def predictions(self) -> Path:
        """Label maps of the scored cases, `<site>/<case>.nii.gz`."""
        return self.path / "predictions"

    @property
    def report(self) -> Path:
        """The page to look at."""
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        """Scalars for TensorBoard."""
        return self.path / "tensorboard"

    def site(self, name: str) -> Path:
        """What a simulated site keeps for itself."""
        return self.path / "sites" / name

    @property
    def complete(self) -> bool:
        """Whether the run has been trained and scored."""
        return self.metrics.is_file()

    @property
    def started(self) -> bool:
        """Whether a run lives here."""
        return self.manifest.is_file()

    def read_manifest(self) -> dict[str, Any]:
        """The manifest, or an error that says what to do."""
        try:
            content: dict[str, Any] = read_json(self.manifest.read_bytes())
            return content
        except FileNotFoundError as error:
            raise RunError(
                "This is not a run folder.",
                where=str(self.path),
                why="it has no manifest.json",
                fix="Point to a folder that 'panorgan train' or 'panorgan demo' wrote.",
            ) from error
        except ValueError as error:
            raise RunError(
                "manifest.json is damaged.",
                where=str(self.manifest),
                why=str(error),
                fix="Restore it from a backup, or start a new run in another folder.",
            ) from error
