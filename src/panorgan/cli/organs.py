"""`panorgan organs`: the catalogue."""

from __future__ import annotations

import json

from rich.table import Table

from panorgan.anatomy import catalogue
from panorgan.cli.console import Console
from panorgan.errors import AnatomyError, did_you_mean

# Columns a terminal needs for the table with codes.
_WIDE = 110


def print_organs(as_json: bool, text: str = "") -> None:
    """Every organ of the catalogue, or those with a text in one of their names."""
    wanted = text.lower()
    organs = [o for o in catalogue().values() if any(wanted in name.lower() for name in (o.name, o.title, *o.aliases))]
    if not organs:
        known = [name for organ in catalogue().values() for name in (organ.name, *organ.aliases)]
        raise AnatomyError(
            f"No organ name in the catalogue contains {text!r}.",
            code="no-organ-found",
            where="panorgan organs",
            why=did_you_mean(text, known),
            fix="Give part of a name, such as 'liv'; to add an organ, use `organs:` in the experiment file.",
        )
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
        code = [f"{organ.snomed_value} {organ.snomed_meaning}".strip()] if wide else []
        table.add_row(f"[{organ.colour}]■[/]", organ.name, belongs if organ.parent else "", *code, names)
    console.print(table)
