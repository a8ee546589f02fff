"""Every error and every finding of these rooms has a code: a fixed word that programs and tests can rely on."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import panorgan
from panorgan.errors import AnatomyError, ConfigError, DataError, MessageError, PanorganError, RunError
from panorgan.federation.audit import AuditError
from panorgan.federation.failures import (
    CODES,
    DataChangedError,
    EgressError,
    LostStateError,
    NotAgreedError,
    NotApprovedError,
    TooManyQuestionsError,
    WrongExperimentError,
    code_of,
)

ROOMS = ("federation", "deployment")
SOURCE = Path(panorgan.__file__).parent
FILES = sorted(path for room in ROOMS for path in (SOURCE / room).rglob("*.py"))
CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node


def code_in(call: ast.Call, position: int | None = None) -> ast.expr | None:
    """The argument `code`, by name or by its place."""
    named = next((keyword.value for keyword in call.keywords if keyword.arg == "code"), None)
    placed = position is not None and len(call.args) > position
    return call.args[position] if placed else named


def literals(code: ast.expr) -> list[str]:
    return [node.value for node in ast.walk(code) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_every_error_has_a_code(path):
    pytest.importorskip("nvflare")
    name = ".".join(("panorgan", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    module = importlib.import_module(name)
    for call in calls(path):
        kind = getattr(module, call.func.id, None)
        if isinstance(kind, type) and issubclass(kind, PanorganError):
            code = code_in(call)
            assert code is not None or kind.code, f"{path.name}:{call.lineno} raises {kind.__name__} without a code"
            assert code is None or all(map(CODE.fullmatch, literals(code))), f"{path.name}:{call.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_every_warning_and_failure_of_preflight_has_a_code(path):
    for call in calls(path):
        if call.func.id == "Check" and "ok" not in literals(call.args[1]) and "skipped" not in literals(call.args[1]):
            code = code_in(call, position=4)
            assert code is not None, f"{path.name}:{call.lineno}"
            assert all(map(CODE.fullmatch, literals(code))), f"{path.name}:{call.lineno}"


@pytest.mark.parametrize(
    ("error", "travels"),
    [
        (WrongExperimentError("x"), "wrong-experiment"),
        (NotApprovedError("x"), "not-approved"),
        (TooManyQuestionsError("x"), "too-many-questions"),
        (NotAgreedError("x", code="no-such-round"), "not-agreed"),
        (LostStateError("x"), "lost-state"),
        (EgressError("x"), "egress-refused"),
        (AuditError("x", code="audit-log-broken"), "egress-refused"),
        (DataChangedError("x"), "data-changed"),
        (MessageError("x", code="not-a-message"), "bad-request"),
        (ConfigError("x", code="data"), "config"),
        (AnatomyError("x"), "config"),
        (DataError("x", code="not-3d"), "data"),
        (RunError("x", code="state-unreadable"), "state"),
        (PanorganError("x"), "state"),
        (MemoryError(), "memory"),
        (OSError(), "disk"),
        (KeyError(), "internal"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_only_codes_of_the_list_travel(error, travels):
    assert code_of(error) == travels
    assert travels in CODES
