"""`panorgan methods` and `panorgan organs`: tables from the registries."""

from __future__ import annotations

import inspect
import json

from rich.console import Console
from rich.table import Table

from panorgan.anatomy import catalogue


def print_methods(as_json: bool) -> None:
    """Every registered method with its settings and their defaults."""
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
    table = Table("method", "what it does", "settings (default)", title="Methods", title_justify="left")
    for entry in described:
        settings = ", ".join(f"{key} ({value['default']})" for key, value in entry["settings"].items())  # type: ignore[attr-defined]
        where = " [dim](pooled data)[/]" if entry["pooled"] else ""
        table.add_row(f"[bold]{entry['name']}[/]", f"{entry['description']}{where}", settings)
    Console().print(table)


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
    table = Table("", "organ", "belongs to", "SNOMED CT", "also known as", title="Organs", title_justify="left")
    for organ in organs:
        belongs = f"{organ.relation} of {organ.parent}" if organ.relation == "part" else f"inside {organ.parent}"
        names = ", ".join(organ.aliases[:5]) + (" …" if len(organ.aliases) > 5 else "")
        code = f"{organ.snomed_value} {organ.snomed_meaning}"
        table.add_row(f"[{organ.colour}]■[/]", organ.name, belongs if organ.parent else "", code, names)
    Console().print(table)
