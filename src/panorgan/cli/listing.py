"""`panorgan methods` and `panorgan organs`: tables from the registries."""

from __future__ import annotations

import inspect
import json

from rich.console import Console
from rich.table import Table

from panorgan.anatomy import catalogue

# Columns a terminal needs for the table with codes.
_WIDE = 110


def print_methods(as_json: bool) -> None:
    """Every registered method with its settings and their defaults."""
    from panorgan.methods.base import MethodConfig
    from panorgan.methods.registry import methods

    described = [
        {
            "name": name,
            "description": inspect.getdoc(method) or "",
            "pooled": method.pooled,
            "settings": {
                key: {"default": field.default, "meaning": field.description or ""}
                for key, field in method.Config.model_fields.items()
            },
        }
        for name, method in methods().items()
    ]
    if as_json:
        print(json.dumps(described))
        return
    console = Console()
    table = Table("method", "what it does", "own settings (default)", title="Methods", title_justify="left")
    shared = set(MethodConfig.model_fields)
    meanings: dict[str, str] = {}
    for name, method in methods().items():
        own = {key: field for key, field in method.Config.model_fields.items() if key not in shared}
        meanings |= {f"{name}.{key}": field.description or "" for key, field in own.items()}
        where = " [dim](pooled data)[/]" if method.pooled else ""
        settings = ", ".join(f"{key} ({field.default})" for key, field in own.items())
        table.add_row(f"[bold]{name}[/]", f"{inspect.getdoc(method) or ''}{where}", settings)
    console.print(table)
    every = Table("setting", "default", "meaning", title="Settings that every method has", title_justify="left")
    for key, field in MethodConfig.model_fields.items():
        every.add_row(key, str(field.default), field.description or "")
    console.print(every)
    for key, meaning in meanings.items():
        console.print(f"{key}: {meaning}", markup=False, highlight=False)


def print_organs(as_json: bool) -> None:
    """Every organ of the catalogue."""
    organs = catalogue().values()
    if as_json:
        fields = (
            "name",
            "title",
            "region",
            "kind",
            "parent",
            "relation",
            "side",
            "snomed_value",
            "snomed_meaning",
        )
        print(json.dumps([{f: getattr(o, f) for f in fields} | {"aliases": list(o.aliases)} for o in organs]))
        return
    console = Console()
    wide = console.width >= _WIDE
    codes = ["SNOMED CT"] if wide else []  # in a narrow terminal the names matter more; --json has the codes
    table = Table("", "organ", "belongs to", *codes, "also known as", title="Organs", title_justify="left")
    for organ in organs:
        belongs = f"{organ.relation} of {organ.parent}" if organ.relation == "part" else f"inside {organ.parent}"
        names = ", ".join(organ.aliases[:5]) + (" …" if len(organ.aliases) > 5 else "")
        code = [f"{organ.snomed_value} {organ.snomed_meaning}"] if wide else []
        table.add_row(f"[{organ.colour}]■[/]", organ.name, belongs if organ.parent else "", *code, names)
    console.print(table)
