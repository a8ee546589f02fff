"""Methods by name. A file in this folder that registers a method is found automatically.

So is one in another installed package that names it as an entry point of the group `panorgan.methods`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType

from panorgan.errors import ConfigError, did_you_mean
from panorgan.methods.base import Method, MethodConfig

_registered: dict[str, type[Method]] = {}


def register(name: str, config: type[MethodConfig] = MethodConfig) -> Callable[[type[Method]], type[Method]]:
    """Class decorator: make a method known under a name."""

    def add(method: type[Method]) -> type[Method]:
        if name in _registered and _registered[name].__module__ != method.__module__:
            raise ConfigError(
                f"Two methods are called {name!r}.",
                code="duplicate-method",
                where=method.__module__,
                fix="Rename one of them.",
            )
        _refuse_undescribed(method)
        method.name = name
        method.Config = config
        _registered[name] = method
        return method

    return add


def _refuse_undescribed(method: type[Method]) -> None:
    """Hospitals decide by these descriptions what may leave: a method without them is refused."""
    for declared in ("numbers", "tensors"):
        said = getattr(method, declared)
        words = said if isinstance(said, Mapping) else dict.fromkeys(said)
        silent = [name for name, what in words.items() if not (isinstance(what, str) and what.strip())]
        if silent or words is not said:
            raise ConfigError(
                "A method does not describe what leaves a site.",
                code="undescribed-payload",
                where=f"{method.__module__}.{method.__qualname__}.{declared}",
                why=f"without a description: {', '.join(silent) or declared}",
                fix='Describe every name or pattern, such as {"agreement/*": "how alike the heads predict"}.',
            )


@cache
def _import_all() -> None:
    import panorgan.methods as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for plugin in entry_points(group="panorgan.methods"):
        plugin.load()


def methods() -> Mapping[str, type[Method]]:
    """Every known method, sorted by name."""
    _import_all()
    return MappingProxyType(dict(sorted(_registered.items())))


def find_method(name: str) -> type[Method]:
    """The method of that name, or an error that suggests one."""
    known = methods()
    if name not in known:
        raise ConfigError(
            f"There is no method called {name!r}.",
            code="unknown-method",
            where="method.name",
            why=did_you_mean(name, known),
            fix=f"Choose one of: {', '.join(known)} ('panorgan methods' describes them).",
        )
    return known[name]
