"""How well a predicted organ mask matches the true one: every metric is one entry of `METRICS`.

Everything that shows metrics (CSV files, reports, comparisons, ablations, docs/metrics.md) follows from the entries. An
organ that is unknown in a case must not be scored; the caller leaves it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from panorgan.errors import ConfigError
from panorgan.evaluation.mask_pair import BoolArray, MaskPair

Where = Literal["report", "comparison", "ablation"]
"""A run's report: a column. A comparison: a table, methods × organs. An ablation: a column of the module table."""
Undefined = Literal["never", "one mask empty", "truth empty", "prediction empty", "no background"]
LEADING = "dice"
"""Models are selected, tested, tabled and drawn by this one, whatever its entry says; `shown` is about the others."""
NSD_TOLERANCE_MM = 2.0

# Headers store the spacing as 32-bit floats: a distance equal to the tolerance may come out slightly above it.
_ROUNDING_SLACK_MM = 1e-4


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric: its name, the meaning of its values, where it is shown, and how it is computed.

    Attributes
    ----------
    name : the column in metrics.csv, where every metric has one.
    title : the head of a column, such as ``HD95``.
    description : one line, to follow the title and a colon.
    compute : the value of one organ in one case; NaN where it is not defined.
    unit : such as ``mm``; empty for shares.
    better : when it is ``higher`` or ``lower``, or nearer to ``zero``.
    range : least and largest value.
    undefined : when there is no value; two empty masks always have one.
    shown : where it is shown besides metrics.csv, and with how many decimals.
    long_title : the heading of its table in a comparison; the title where it is empty.
    table : name of that table in files and JSON.
    """

    name: str
    title: str
    description: str
    compute: Callable[[MaskPair], float]
    unit: str = ""
    better: Literal["higher", "lower", "zero"] = "higher"
    range: tuple[float, float] = (0.0, 1.0)
    undefined: Undefined = "never"
    shown: Mapping[Where, int] = field(default_factory=dict)
    long_title: str = ""
    table: str = ""

    @property
    def column(self) -> str:
        """``HD95 (mm)``, for the head of a column."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def heading(self) -> str:
        """``Average surface distance in mm``, for the head of a table."""
        return (self.long_title or self.title) + (f" in {self.unit}" if self.unit else "")

    @property
    def verdict(self) -> str:
        """``lower is better``."""
        return "nearer to zero is better" if self.better == "zero" else f"{self.better} is better"

    @property
    def sentence(self) -> str:
        """What it is and how it is read, for below a table."""
        nowhere = "" if self.undefined == "never" else f"; not defined: {self.undefined}"
        return f"{self.title}: {self.description}; {self.verdict}{nowhere}."

    @property
    def table_name(self) -> str:
        """The name of its table in files and JSON; cannot clash with any other."""
        return self.table or f"metric_{self.name}"


def dice(prediction: BoolArray, truth: BoolArray) -> float:
    """Dice alone, for the validation of every round; 1 when both masks are empty."""
    total = int(np.count_nonzero(prediction)) + int(np.count_nonzero(truth))
    return 2 * int(np.count_nonzero(prediction & truth)) / total if total else 1.0


def normalised_surface_dice(pair: MaskPair, tolerance_mm: float = NSD_TOLERANCE_MM) -> float:
    """The share of surface voxels within the tolerance of the other surface; their area is not estimated."""
    if not tolerance_mm >= 0:
        raise ConfigError(
            f"The surface Dice tolerance is {tolerance_mm} mm.",
            code="bad-tolerance",
            fix="Use zero or a positive number of mm.",
        )
    return float(np.mean(pair.pooled_distances <= tolerance_mm + _ROUNDING_SLACK_MM))


def _dice(pair: MaskPair) -> float:
    return 2 * pair.n_both / (pair.n_prediction + pair.n_truth) if pair.n_either else 1.0


def _jaccard(pair: MaskPair) -> float:
    return pair.n_both / pair.n_either if pair.n_either else 1.0


def _hausdorff(pair: MaskPair) -> float:
    return float(pair.pooled_distances.max())


def _hausdorff_95(pair: MaskPair) -> float:
    """As MONAI has it; not a percentile of the pooled distances."""
    return float(max(np.percentile(directed, 95) for directed in pair.surface_distances))


def _average_distance(pair: MaskPair) -> float:
    return float(pair.pooled_distances.mean())


def _sensitivity(pair: MaskPair) -> float:
    return _rate(pair.n_both, pair.n_truth, pair.n_prediction)


def _specificity(pair: MaskPair) -> float:
    n = pair.n_voxels
    return _rate(n - pair.n_either, n - pair.n_truth, n - pair.n_prediction)


def _rate(n_hit: int, n_true: int, n_predicted: int) -> float:
    """Hits over true voxels; with nothing to hit, 1 when nothing was predicted and undefined otherwise."""
    if n_true:
        return n_hit / n_true
    return math.nan if n_predicted else 1.0


def _relative_volume_error(pair: MaskPair) -> float:
    if pair.n_truth:
        return (pair.n_prediction - pair.n_truth) / pair.n_truth
    return math.nan if pair.n_prediction else 0.0


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            name="dice",
            title="Dice",
            description="overlap, twice the voxels in both masks over the voxels of both",
            compute=_dice,
        ),
        Metric(
            name="jaccard",
            title="Jaccard",
            description="overlap, the voxels in both masks over those in either",
            compute=_jaccard,
        ),
        Metric(
            name="hd",
            title="HD",
            description="Hausdorff distance, the largest distance between the two surfaces in either direction",
            compute=_hausdorff,
            unit="mm",
            better="lower",
            range=(0.0, math.inf),
            undefined="one mask empty",
        ),
        Metric(
            name="hd95",
            title="HD95",
            description="95th percentile of the distance between the two surfaces, the larger of both directions",
            compute=_hausdorff_95,
            unit="mm",
            better="lower",
            range=(0.0, math.inf),
            undefined="one mask empty",
            shown={"report": 1},
        ),
        Metric(
            name="assd",
            title="ASSD",
            description="average symmetric surface distance, the mean over both directions pooled",
            compute=_average_distance,
            unit="mm",
            better="lower",
            range=(0.0, math.inf),
            undefined="one mask empty",
            shown={"report": 1, "comparison": 2},
            long_title="Average surface distance",
            table="distances",
        ),
        Metric(
            name="nsd",
            title="NSD",
            description=f"share of both surfaces that lies within {NSD_TOLERANCE_MM:g} mm of the other (surface Dice)",
            compute=normalised_surface_dice,
            shown={"report": 2},
        ),
        Metric(
            name="sensitivity",
            title="Sensitivity",
            description="share of the true organ that was predicted",
            compute=_sensitivity,
            undefined="truth empty",
        ),
        Metric(
            name="specificity",
            title="Specificity",
            description="share of the true background that was predicted so; depends on how much the image holds",
            compute=_specificity,
            undefined="no background",
        ),
        Metric(
            name="rve",
            title="RVE",
            description="relative volume error, (V_pred − V_true) / V_true; negative when too little was predicted",
            compute=_relative_volume_error,
            better="zero",
            range=(-1.0, math.inf),
            undefined="truth empty",
        ),
    )
}
"""Every metric by name, in the order of metrics.csv."""


def score(prediction: BoolArray, truth: BoolArray, spacing: Sequence[float]) -> dict[str, float]:
    """Every metric of a predicted mask against the true one, by name; NaN where one is not defined.

    Parameters
    ----------
    prediction, truth : bool arrays of one shape, (H, W) or (D, H, W).
    spacing : voxel size in mm, one number per axis in array order.
    """
    pair = MaskPair(np.asarray(prediction), np.asarray(truth), spacing)
    return {name: metric.compute(pair) for name, metric in METRICS.items()}


def is_missed(values: Mapping[str, float]) -> bool:
    """Whether exactly one of truth and prediction was empty: only then there is no surface distance."""
    return math.isnan(values["assd"])


def further_metrics(where: Where, scores: Iterable[Mapping[str, object]] = ()) -> list[Metric]:
    """The metrics shown there, besides the leading one.

    Those that some of the scores lack are left out: a run that was scored before a metric was added.
    """
    rows = list(scores)
    return [m for m in METRICS.values() if where in m.shown and all(m.name in row for row in rows)]
