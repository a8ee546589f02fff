"""panorgan — hospitals that each label different organs train one model that segments them all.

The names below are the library; docs/library.md shows examples. They are imported on first use, so that
`import panorgan` is quick. The library never prints and never exits: it raises `PanorganError`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from panorgan.errors import PanorganError

if TYPE_CHECKING:
    from panorgan.api import compare, predict
    from panorgan.config import Experiment, load_experiment
    from panorgan.exporting.export import export
    from panorgan.methods.base import Method, MethodConfig, ServerRule, SiteRule
    from panorgan.methods.registry import register
    from panorgan.report.page import write_report
    from panorgan.workflows.doctor import doctor
    from panorgan.workflows.execute import evaluate, train
    from panorgan.workflows.model_bundle import Model, load_model
    from panorgan.workflows.run import Run
    from panorgan.workflows.tables import Table
    from panorgan.workflows.train_comparison import ComparisonObserver

__version__ = "0.1.0"

__all__ = [
    "ComparisonObserver",
    "Experiment",
    "Method",
    "MethodConfig",
    "Model",
    "PanorganError",
    "Run",
    "ServerRule",
    "SiteRule",
    "Table",
    "__version__",
    "compare",
    "doctor",
    "evaluate",
    "export",
    "load_experiment",
    "load_model",
    "predict",
    "register",
    "train",
    "write_report",
]

_HOME = {
    "ComparisonObserver": "workflows.train_comparison",
    "Experiment": "config",
    "Method": "methods.base",
    "MethodConfig": "methods.base",
    "Model": "workflows.model_bundle",
    "Run": "workflows.run",
    "ServerRule": "methods.base",
    "SiteRule": "methods.base",
    "Table": "workflows.tables",
    "compare": "api",
    "doctor": "workflows.doctor",
    "evaluate": "workflows.execute",
    "export": "exporting.export",
    "load_experiment": "config",
    "load_model": "workflows.model_bundle",
    "predict": "api",
    "register": "methods.registry",
    "train": "workflows.execute",
    "write_report": "report.page",
}

if not TYPE_CHECKING:  # otherwise a misspelled name would type-check

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
