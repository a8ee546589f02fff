"""The metric that docs/add-a-metric.md shows, made from the page itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from panorgan.evaluation import metrics

PAGE = Path(__file__).parents[2] / "docs" / "add-a-metric.md"


def metric_of_the_docs() -> metrics.Metric:
    """Run the snippet where it belongs: its functions among those of `metrics.py`, its entry in a tuple."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    *functions, entry = ast.parse(source).body
    assert isinstance(entry, ast.Expr)
    names = dict(vars(metrics))
    exec(compile(ast.Module(functions, []), str(PAGE), "exec"), names)
    (metric,) = eval(compile(ast.Expression(entry.value), str(PAGE), "eval"), names)
    assert isinstance(metric, metrics.Metric)
    return metric
