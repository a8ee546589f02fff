"""The results of `panorgan analyze`, and their files: `analysis.json`, and the same numbers as tables in
`analysis/`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from panorgan.checksums import read_json, sealed_json
from panorgan.csv_cells import escape_cell
from panorgan.errors import RunError
from panorgan.federation.files import write_atomically
from panorgan.workflows.run import Run

ALL_SITES = "all sites"
"""The mean of the sites' losses. No site can have this name: names contain no blanks."""
_FORMAT = 1


@dataclass(frozen=True)
class PlaceCurvature:
    """Loss, norm of its gradient and curvature at one site, or at all; empty or NaN if not requested."""

    place: str
    loss: float
    gradient_norm: float
    eigenvalues: tuple[float, ...]
    trace: float
    trace_standard_error: float

    @property
    def largest(self) -> float:
        """λ_max."""
        return self.eigenvalues[0] if self.eigenvalues else math.nan

    @property
    def ratio(self) -> float:
        """λ_max / λ_5; NaN unless at least five are known and the fifth is positive."""
        known = len(self.eigenvalues) >= 5 and self.eigenvalues[4] > 0
        return self.eigenvalues[0] / self.eigenvalues[4] if known else math.nan


@dataclass(frozen=True)
class Landscape:
    """Losses by place on a plane through the model: `losses[place][i][j]` at (`steps[i]`, `steps[j]`)."""

    steps: tuple[float, ...]
    losses: dict[str, tuple[tuple[float, ...], ...]]


@dataclass(frozen=True)
class Similarity:
    """Linear CKA of this model's layers (rows) with those of another model (columns), as far as both have them.

    `kind`: `run` for the model of another run, `local` for a site's model of this run before it was averaged.
    """

    other: str
    kind: Literal["run", "local"]
    layers: tuple[str, ...]
    cka: tuple[tuple[float, ...], ...]

    @property
    def same_layer(self) -> tuple[float, ...]:
        """Each layer with itself in the other model."""
        return tuple(self.cka[i][i] for i in range(len(self.layers)))


@dataclass(frozen=True)
class Analysis:
    """All results; `about` holds run, round, parameters, patches, settings, device and versions."""

    about: dict[str, Any]
    curvature: tuple[PlaceCurvature, ...]
    landscape: Landscape | None
    similarity: tuple[Similarity, ...]


def write_analysis(run: Run, analysis: Analysis) -> None:
    """The tables first, `analysis.json` last: if it exists, the others belong to it."""
    tables = {"hessian.csv": _hessian_rows(analysis)}
    if analysis.landscape is not None:
        tables["landscape.csv"] = _landscape_rows(analysis.landscape)
    if analysis.similarity:
        tables["cka.csv"] = _cka_rows(analysis.similarity)
    old = (*run.analysis_folder.glob("*.csv"), *run.analysis_folder.glob("*.svg"))
    for path in (run.analysis_file, *old):
        path.unlink(missing_ok=True)
    for name, rows in tables.items():
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows([escape_cell(cell) for cell in row] for row in rows)
        write_atomically(run.analysis_folder / name, text.getvalue())
    content = _without_nan({"format": _FORMAT, **asdict(analysis)})
    write_atomically(run.analysis_file, sealed_json(content, indent=1, allow_nan=False))


def read_analysis(run: Run) -> Analysis | None:
    """Earlier results; None if there are none."""
    try:
        content = read_json(run.analysis_file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(run, error) from error
    try:
        plane = content["landscape"]
        return Analysis(
            about=dict(content["about"]),
            curvature=tuple(_curvature(place) for place in content["curvature"]),
            landscape=None if plane is None else _landscape(plane),
            similarity=tuple(
                Similarity(s["other"], s["kind"], tuple(s["layers"]), _matrix(s["cka"])) for s in content["similarity"]
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(run, error) from error


def _damaged(run: Run, error: Exception) -> RunError:
    return RunError(
        "The analysis of this run cannot be read.",
        code="analysis-damaged",
        where=str(run.analysis_file),
        why=f"{type(error).__name__}: {error}",
        fix="Repeat it with 'panorgan analyze', or remove the file.",
    )


def _curvature(content: dict[str, Any]) -> PlaceCurvature:
    numbers = {key: _number(content[key]) for key in ("loss", "gradient_norm", "trace", "trace_standard_error")}
    return PlaceCurvature(str(content["place"]), eigenvalues=tuple(map(float, content["eigenvalues"])), **numbers)


def _landscape(content: dict[str, Any]) -> Landscape:
    losses = {place: _matrix(rows) for place, rows in content["losses"].items()}
    return Landscape(tuple(map(float, content["steps"])), losses)


def _matrix(rows: Iterable[Sequence[float | None]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(_number(value) for value in row) for row in rows)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _without_nan(value: Any) -> Any:
    """JSON has neither NaN nor infinity: null instead."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _hessian_rows(analysis: Analysis) -> Iterable[Sequence[Any]]:
    most = max((len(place.eigenvalues) for place in analysis.curvature), default=0)
    names = [f"eigenvalue_{rank}" for rank in range(1, most + 1)]
    yield ("place", "loss", "gradient_norm", "trace", "trace_standard_error", "largest_over_fifth", *names)
    for p in analysis.curvature:
        yield (p.place, p.loss, p.gradient_norm, p.trace, p.trace_standard_error, p.ratio, *p.eigenvalues)


def _landscape_rows(landscape: Landscape) -> Iterable[Sequence[Any]]:
    yield ("place", "first", "second", "loss")
    for place, rows in landscape.losses.items():
        for a, row in zip(landscape.steps, rows, strict=True):
            yield from ((place, a, b, loss) for b, loss in zip(landscape.steps, row, strict=True))


def _cka_rows(similarity: Iterable[Similarity]) -> Iterable[Sequence[Any]]:
    yield ("other", "kind", "layer", "other_layer", "cka")
    for pair in similarity:
        for layer, row in zip(pair.layers, pair.cka, strict=True):
            yield from ((pair.other, pair.kind, layer, o, value) for o, value in zip(pair.layers, row, strict=True))
