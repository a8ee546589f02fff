"""From scores per case to the figures of a table: mean, spread, bootstrap interval, misses.

Everything here is deterministic and does not depend on the order of the rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from panorgan.errors import ConfigError, DataError, did_you_mean

TEST_SPLIT = "test"
EXTERNAL_SPLIT = "external"

Row = Mapping[str, object]
Key = TypeVar("Key", str, tuple[str, str])

# Keeps the resampling of a large table at a few tens of megabytes.
_DRAWS_PER_BLOCK = 2_000_000


@dataclass(frozen=True)
class Summary:
    """One figure of a table.

    Attributes
    ----------
    mean : NaN when nothing was scored.
    sd : sample standard deviation (n − 1); NaN below two values, because one value says nothing about spread.
    n : the values that count, NaN left out.
    low, high : bootstrap interval of the mean.
    missed : cases where exactly one of prediction and truth was empty. They count in `n` for Dice (as 0) and
        not for distances (NaN), so read this next to the mean.
    """

    mean: float
    sd: float
    n: int
    low: float
    high: float
    missed: int


@dataclass(frozen=True)
class Table:
    """Summaries of one metric. Each is taken over rows, one row being one organ of one case.

    Attributes
    ----------
    metric : name of the column summarised.
    cells : (organ, site) → summary, for sites of the federation and external ones.
    organs : organ → summary over the test rows of all sites of the federation.
    sites : site → summary over all organs of that site, external sites included.
    overall : over all test rows of the federation. An organ or site with more cases weighs more.
    external : over all rows of external sites.
    """

    metric: str
    cells: dict[tuple[str, str], Summary]
    organs: dict[str, Summary]
    sites: dict[str, Summary]
    overall: Summary
    external: Summary


def bootstrap_interval(
    values: Sequence[float] | NDArray[np.floating],
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean; NaN values are ignored.

    Gives (nan, nan) for no value, and the mean twice when there is only one group to draw.

    Parameters
    ----------
    values : one score per row.
    level : coverage, between 0 and 1.
    resamples : how often to draw.
    seed : same seed, same interval.
    groups : one label per value, such as the case. Values of one label are drawn together: organs of one scan
        fail together, and drawing them one by one would make the interval too narrow. Default: each value on
        its own.
    """
    if not 0 < level < 1:
        raise ConfigError(
            f"The interval level is {level}.",
            code="bad-interval-level",
            fix="Use a number between 0 and 1, such as 0.95.",
        )
    if resamples < 1:
        raise ConfigError(
            f"The number of resamples is {resamples}.", code="bad-resamples", fix="Use a positive number, such as 2000."
        )
    sums, counts = _group_sums(np.asarray(values, dtype=np.float64), groups)
    n = len(sums)
    if n == 0:
        return math.nan, math.nan
    if n == 1:
        mean = float(sums[0] / counts[0])
        return mean, mean

    generator = np.random.default_rng(seed)
    block = max(1, _DRAWS_PER_BLOCK // n)
    means = []
    for start in range(0, resamples, block):
        drawn = generator.integers(0, n, size=(min(block, resamples - start), n))
        means.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def summarise(
    values: Sequence[float] | NDArray[np.floating],
    *,
    missed: int | None = None,
    groups: Sequence[Hashable] | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Summary:
    """Mean, spread and bootstrap interval of the values that are not NaN.

    `missed` defaults to the number of NaN values, which is right for distances. For Dice, where a miss is
    a 0, pass the count.
    """
    array = np.asarray(values, dtype=np.float64)
    known = array[~np.isnan(array)]
    low, high = bootstrap_interval(array, level, resamples, seed, groups)
    return Summary(
        mean=float(known.mean()) if known.size else math.nan,
        sd=float(known.std(ddof=1)) if known.size > 1 else math.nan,
        n=int(known.size),
        low=low,
        high=high,
        missed=int(array.size - known.size) if missed is None else missed,
    )


def organ_site_table(
    rows: Sequence[Row], metric: str = "dice", *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Table:
    """Summarise the rows of a metrics.csv per organ, per site, and over all.

    Rows hold `split`, `site`, `case`, `organ` and the metrics, as numbers or as text ("" and "nan" are NaN).
    Rows of other splits than "test" and "external" are left out. Intervals resample cases. Misses are read
    from the `missed` column; without one they are the NaN values.
    """
    scored = _parse(rows, metric)
    test = [row for row in scored if row.split == TEST_SPLIT]
    external = [row for row in scored if row.split == EXTERNAL_SPLIT]

    def summary(chosen: Sequence[_ScoredRow], *name: str) -> Summary:
        return summarise(
            [row.value for row in chosen],
            missed=sum(row.missed for row in chosen),
            groups=[(row.site, row.case) for row in chosen],
            level=level,
            resamples=resamples,
            seed=stable_seed(seed, metric, *name),
        )

    return Table(
        metric=metric,
        cells={
            (organ, site): summary(chosen, "cell", organ, site)
            for (organ, site), chosen in _gather(scored, lambda row: (row.organ, row.site)).items()
        },
        organs={
            organ: summary(chosen, "organ", organ) for organ, chosen in _gather(test, lambda row: row.organ).items()
        },
        sites={site: summary(chosen, "site", site) for site, chosen in _gather(scored, lambda row: row.site).items()},
        overall=summary(test, "overall"),
        external=summary(external, "external"),
    )


@dataclass(frozen=True, order=True)
class _ScoredRow:
    """One row of metrics.csv, reduced to one metric. The fields are in sorting order."""

    site: str
    case: str
    organ: str
    split: str
    value: float
    missed: bool


def _parse(rows: Sequence[Row], metric: str) -> list[_ScoredRow]:
    """The test and external rows, sorted, so that sums do not depend on the order of the file."""
    scored = []
    for number, row in enumerate(rows, start=1):
        where = f"metrics row {number}"
        split, site, case, organ = (str(_field(row, key, where)) for key in ("split", "site", "case", "organ"))
        if split not in (TEST_SPLIT, EXTERNAL_SPLIT):
            continue
        value = _number(_field(row, metric, where), where)
        missed = _flag(row["missed"], where) if "missed" in row else math.isnan(value)
        scored.append(_ScoredRow(site, case, organ, split, value, missed))
    _check_unmixed(scored)
    return sorted(scored, key=lambda row: (row.site, row.case, row.organ))


def _check_unmixed(rows: Sequence[_ScoredRow]) -> None:
    """Refuse what would count twice: a repeated row, or a site both inside and outside the federation."""
    seen: set[tuple[str, str, str]] = set()
    split_of: dict[str, str] = {}
    for row in rows:
        if split_of.setdefault(row.site, row.split) != row.split:
            raise DataError(
                f"The site {row.site!r} has rows of both the test and the external split.",
                code="mixed-splits",
                why="A site is either part of the federation or external.",
            )
        key = (row.site, row.case, row.organ)
        if key in seen:
            raise DataError(
                f"{row.organ!r} of case {row.case!r} is scored twice.",
                code="scored-twice",
                where=f"site {row.site}",
                fix="Pass the rows of one model only.",
            )
        seen.add(key)


def _gather(rows: Sequence[_ScoredRow], key: Callable[[_ScoredRow], Key]) -> dict[Key, list[_ScoredRow]]:
    groups: dict[Key, list[_ScoredRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return dict(sorted(groups.items()))


def _group_sums(
    values: NDArray[np.float64], groups: Sequence[Hashable] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and count per group, over the values that are not NaN. Shapes: (groups,)."""
    known = ~np.isnan(values)
    if groups is None:
        sums = np.sort(values[known])
        return sums, np.ones_like(sums)
    if len(groups) != len(values):
        raise DataError(f"There are {len(values)} values but {len(groups)} group labels.", code="lengths-differ")
    members: dict[Hashable, list[float]] = {}
    for group, value, use in zip(groups, values.tolist(), known.tolist(), strict=True):
        if use:
            members.setdefault(group, []).append(value)
    # Exact sums in sorted order: the interval does not depend on the order of the rows.
    pairs = sorted((math.fsum(group), len(group)) for group in members.values())
    return np.array([total for total, _ in pairs]), np.array([float(count) for _, count in pairs])


def stable_seed(seed: int, *names: str) -> int:
    """A separate seed for each figure, the same on every machine (Python's hash changes per process)."""
    text = "\0".join([str(seed), *names])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _field(row: Row, key: str, where: str) -> object:
    if key not in row:
        raise DataError(
            f"There is no column {key!r}.",
            code="no-column",
            where=where,
            fix=did_you_mean(key, row) or f"Columns: {', '.join(row)}.",
        )
    return row[key]


def _number(raw: object, where: str) -> float:
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        return math.nan
    try:
        value = float(raw)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = math.inf
    if math.isinf(value):
        raise DataError(
            f"{raw!r} is not a score.",
            code="not-a-score",
            where=where,
            why="A finite number, 'nan' or '' is expected.",
        )
    return value


def _flag(raw: object, where: str) -> bool:
    text = str(raw).strip().lower()
    if text in ("true", "1", "1.0"):
        return True
    if text in ("false", "0", "0.0", ""):
        return False
    raise DataError(
        f"{raw!r} is not a yes or no.",
        code="not-a-flag",
        where=where,
        fix="Write True or False in the column 'missed'.",
    )
