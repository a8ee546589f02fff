"""Write the table of all error codes: what each is about, and the fix.

    python scripts/error_codes.py > docs/errors.md

It reads the source, not the running program: every place where an error of panorgan is built, with `…` for what is only
known when it happens. `tests/test_error_codes.py` uses the same places to check that codes are there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "panorgan"
COMMAND = "python scripts/error_codes.py > docs/errors.md"
BASE = "PanorganError"
# Raised by validators; `settings.validated` makes a ConfigError of it.
SETTING, BECOMES = "SettingError", "ConfigError"
_UNKNOWN = "…"
_HEADER = f"""# Error codes

Every error has a code: a short word that stays when its sentences change. The command line shows it behind the first
sentence (`Error: There is no setting called 'x'. [unknown-setting]`), `--json` has it as `"code"`, and in Python it is
`error.code`. What the doctor finds has codes of its own ([doctor.md](doctor.md)); where reading a folder fails in the
same way, they are the same.

Made from the source: `{COMMAND}`. `…` stands for a name or a number.

| Code | What | Fix |
| --- | --- | --- |
"""


@dataclass(frozen=True)
class Place:
    """Where the source builds an error; one for each code that it may get there.

    `code` is empty where another error's is passed on, None where there is none, or none that can be read here.
    """

    file: str
    line: int
    kind: str
    code: str | None
    what: str
    fix: str


def places(source: Path = SOURCE) -> list[Place]:
    """All of them, in the order of files and lines."""
    trees = {path.relative_to(source).as_posix(): ast.parse(path.read_text()) for path in sorted(source.rglob("*.py"))}
    kinds, own = _kinds(trees), _own_codes(trees)
    return [place for file, tree in trees.items() for place in _Module(file, tree, kinds, own).places()]


def page(found: list[Place]) -> str:
    """The table as Markdown."""
    rows: dict[str, list[Place]] = {}
    for place in found:
        if place.code:
            rows.setdefault(place.code, []).append(place)
    return _HEADER + "".join(
        f"| `{code}` | {_cell(p.what for p in own)} | {_cell(p.fix for p in own)} |\n"
        for code, own in sorted(rows.items())
    )


def _cell(texts: Iterator[str]) -> str:
    """Different texts below each other."""
    return "<br>".join(
        dict.fromkeys(" ".join(text.split()).replace("|", r"\|").replace("<", "&lt;") for text in texts if text)
    )


def _kinds(trees: Mapping[str, ast.Module]) -> dict[str, ast.ClassDef | None]:
    """Names of all classes of errors, with the class where it has an `__init__` of its own."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found: dict[str, ast.ClassDef | None] = {BASE: None, SETTING: None}
    while new := [c for c in classes if c.name not in found and any(_name(base) in found for base in c.bases)]:
        found |= {c.name: c if _init(c) else None for c in new}
    return found


def _own_codes(trees: Mapping[str, ast.Module]) -> dict[str, str]:
    """Codes that classes name for all of their errors (`code = "lost-state"`); subclasses have them too."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = {kind.name: code for kind in classes if (code := _own_code(kind))}
    while new := {
        c.name: found[base] for c in classes if c.name not in found for base in map(_name, c.bases) if base in found
    }:
        found |= new
    return found


def _own_code(kind: ast.ClassDef) -> str:
    for node in kind.body:
        if isinstance(node, ast.Assign) and _name(node.targets[0]) == "code" and isinstance(node.value, ast.Constant):
            return str(node.value.value)
    return ""


def _init(kind: ast.ClassDef) -> ast.FunctionDef | None:
    return next((node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


class _Module:
    """The places of one file. A function that hands its argument `code` on to an error is a way to build one, too."""

    def __init__(
        self, file: str, tree: ast.Module, kinds: Mapping[str, ast.ClassDef | None], own: Mapping[str, str]
    ) -> None:
        self.file, self.tree, self.kinds, self.own = file, tree, kinds, own
        self.functions = {
            inner: function
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef)
            for inner in ast.walk(function)
        }  # walked from outside to inside: the innermost function is what stays
        self.classes = {
            inner: kind
            for kind in ast.walk(tree)
            if isinstance(kind, ast.ClassDef) and kind.name in kinds and kind.name not in (BASE, SETTING)
            for inner in ast.walk(kind)
        }
        self.makers: dict[str, str] = {}
        for call in self._calls():
            kind, function = self._kind(call), self.functions.get(call)
            if kind and function and _hands_on(_argument(call, "code"), function):
                self.makers[kind if function.name == "__init__" else function.name] = kind

    def places(self) -> Iterator[Place]:
        for call in self._calls():
            kind, code = self._kind(call) or self.makers.get(_name(call.func), ""), _argument(call, "code")
            if not kind or _hands_on(code, self.functions.get(call)) or self._gives_its_own(call):
                continue
            what, fix = call.args[0] if call.args else None, _argument(call, "fix")
            for choices, word in _branches(code):
                sentence = _Sentence(self.functions.get(call), call.lineno, choices)
                yield Place(
                    self.file,
                    call.lineno,
                    BECOMES if kind == SETTING else kind,
                    self.own.get(kind) if code is None else word,
                    sentence.text(what),
                    "Correct the setting." if kind == SETTING else sentence.text(fix),
                )

    def _calls(self) -> list[ast.Call]:
        return sorted(
            (n for n in ast.walk(self.tree) if isinstance(n, ast.Call)), key=lambda n: (n.lineno, n.col_offset)
        )

    def _kind(self, call: ast.Call) -> str:
        """The class of the error that a call builds, or of which it is `super().__init__`."""
        if _name(call.func) in self.kinds:
            return _name(call.func)
        own = isinstance(call.func, ast.Attribute) and call.func.attr == "__init__" and self.classes.get(call)
        return own.name if own else ""

    def _gives_its_own(self, call: ast.Call) -> bool:
        """Whether the class has an `__init__` that knows the code."""
        kind = self.kinds.get(_name(call.func))
        return kind is not None and _argument(call, "code") is None and kind.name not in self.makers


Choices = dict[str, bool]
"""Conditions, and whether they hold."""


@dataclass(frozen=True)
class _Sentence:
    """What an argument says, as far as the source tells it: in a function, at a line, under conditions."""

    function: ast.FunctionDef | None
    line: int
    choices: Choices

    def text(self, node: ast.expr | None) -> str:
        match node:
            case None:
                return ""
            case ast.Constant():
                return str(node.value)
            case ast.JoinedStr():
                return "".join(self.text(value) for value in node.values)
            case ast.FormattedValue(value=ast.IfExp() as inner) if _condition(inner.test)[0] in self.choices:
                return self.text(inner)
            case ast.IfExp():
                return self._chosen(node)
            case ast.BinOp(op=ast.Add()):
                return self.text(node.left) + self.text(node.right)
            case ast.Name():
                return self.text(self._assigned(node.id)) or _UNKNOWN
        return _UNKNOWN

    def _chosen(self, node: ast.IfExp) -> str:
        condition, positive = _condition(node.test)
        if condition in self.choices:
            return self.text(node.body if self.choices[condition] == positive else node.orelse)
        return " / ".join(text for text in (self.text(node.body), self.text(node.orelse)) if text)

    def _assigned(self, name: str) -> ast.expr | None:
        """What a name was set to last before that line."""
        assignments = (n for n in ast.walk(self.function or ast.Pass()) if isinstance(n, ast.Assign))
        for node in sorted((n for n in assignments if n.lineno < self.line), key=lambda n: -n.lineno):
            target, value = node.targets[0], node.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            for to, own in zip(target.elts, value.elts, strict=False) if several else [(target, value)]:
                if _name(to) == name:
                    return own
        return None


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _hands_on(code: ast.expr | None, function: ast.FunctionDef | None) -> bool:
    """Whether a code is an argument of the function around it."""
    names = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)] if function else []
    return isinstance(code, ast.Name) and code.id == "code" and "code" in names


def _branches(code: ast.expr | None) -> list[tuple[Choices, str | None]]:
    """The codes that an expression may be, each with the conditions under which it is."""
    if isinstance(code, ast.IfExp):
        condition, positive = _condition(code.test)
        sides = ((code.body, positive), (code.orelse, not positive))
        return [({condition: holds, **more}, word) for side, holds in sides for more, word in _branches(side)]
    if isinstance(code, ast.Constant) and isinstance(code.value, str) and code.value:
        return [({}, code.value)]
    return [({}, "" if isinstance(code, ast.Attribute) and code.attr == "code" else None)]


def _condition(test: ast.expr) -> tuple[str, bool]:
    """A condition without its `not`, and whether it had none."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ast.unparse(test.operand), False
    return ast.unparse(test), True


if __name__ == "__main__":
    print(page(places()), end="")
