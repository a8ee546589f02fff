"""`panorgan methods`: the registered methods."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from panorgan.cli.console import Console, say_lines
from panorgan.cli.loading import load
from panorgan.methods.about.stored import stored_methods
from panorgan.methods.about.words import NETWORKS, as_yaml, body, by_group, pooled_words, size_words, variant_words

if TYPE_CHECKING:  # they import torch, and `--help` must be quick
    from panorgan.methods.about.metadata import FieldDescription, MethodDescription

_MARKED = re.compile(r"`([^`]+)`|\*(\w[^*`]*)\*")


def print_yaml(name: str) -> None:
    """An experiment file to start from: the method's paper's, or the method on generated hospitals."""
    load("panorgan.methods.about.experiment")
    from panorgan.methods.about.experiment import experiment_text
    from panorgan.methods.registry import find_method

    say_lines(experiment_text(find_method(name)))


def print_methods(name: str | None, as_json: bool, as_markdown: bool) -> None:
    """Every registered method, or one in full."""
    if as_markdown:
        _print_markdown(name)
        return
    if name is None:
        described, common_fields = _descriptions()
        if as_json:
            print(json.dumps([_method_as_json(description) for description in described.values()]))
        else:
            _show_overview(Console(), described.values(), common_fields)
        return
    description = _description(name)
    if as_json:
        print(json.dumps(_method_as_json(description)))
    else:
        _show_method(Console(), description)


def _print_markdown(name: str | None) -> None:
    load("panorgan.report.methods_page")
    from panorgan.methods.about.metadata import describe
    from panorgan.methods.registry import find_method
    from panorgan.report.methods_page import method_section, methods_page

    say_lines(methods_page() if name is None else method_section(describe(find_method(name))))


def _descriptions() -> tuple[Mapping[str, MethodDescription], Iterable[FieldDescription]]:
    """Every method by name, and the settings that all have: stored, or from the registry where that may differ."""
    stored = stored_methods()
    if stored is not None:
        return stored.methods, stored.common_fields
    load("panorgan.methods.about.metadata")
    from panorgan.methods.about.metadata import describe, fields_of
    from panorgan.methods.base import MethodConfig
    from panorgan.methods.registry import methods

    return {name: describe(method) for name, method in methods().items()}, fields_of(MethodConfig)


def _description(name: str) -> MethodDescription:
    stored = stored_methods()
    if stored is not None and name in stored.methods:
        found: MethodDescription = stored.methods[name]
        return found
    load("panorgan.methods.about.metadata")
    from panorgan.methods.about.metadata import describe
    from panorgan.methods.registry import find_method

    return describe(find_method(name))


def _method_as_json(description: MethodDescription) -> dict[str, Any]:
    def sent(uploads: Iterable[Any]) -> list[dict[str, Any]]:
        return [
            {
                "stage": upload.stage,
                "rounds": upload.rounds,
                "weights": upload.weights,
                "tensors": list(upload.tensors),
                "relative_to_fedavg": round(upload.relative, 4),
            }
            for upload in uploads
        ]

    return {
        "name": description.name,
        "group": description.group,
        "description": description.summary,
        "title": description.title,
        "text": description.text,
        "paper": description.paper,
        "equations": dict(description.equations),
        "recipe": dict(description.recipe),
        "pooled": description.pooled,
        "labels": description.labels,
        "network": description.network,
        "stages": list(description.stages),
        "settings": {
            field.name: {
                "type": field.type,
                "default": field.default,
                "meaning": field.meaning,
                "paper": field.paper,
            }
            for field in description.fields
        },
        "numbers": dict(description.numbers),
        "tensors": dict(description.tensors),
        "sent": sent(description.sent),
        "variants": {variant.setting: sent(variant.sent) for variant in description.variants},
    }


def _show_overview(
    console: Console, described: Iterable[MethodDescription], common_fields: Iterable[FieldDescription]
) -> None:
    groups = by_group(described)
    width = max(len(description.name) for members in groups.values() for description in members)
    for title, members in groups.items():
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(width=width, no_wrap=True)
        for description in members:
            what = _inline(description.summary)
            if description.pooled:
                what.append(" (pooled data)", style="dim")
            table.add_row(Text(description.name, style="cyan"), what)
        _show(console, title, table)
    _show(console, "Settings of every method", _settings(common_fields))
    console.print(_inline("`panorgan methods NAME` shows one in full: equations, settings, what leaves a site."))


def _show_method(console: Console, description: MethodDescription) -> None:
    console.print(Text.assemble((description.title, "bold"), f"  ({description.name})"))
    for paragraph in body(description).split("\n\n"):
        points = re.split(r"\n(?=- )", paragraph)  # a list: every point on its own line
        console.print(Padding(Group(*(_inline(" ".join(point.split())) for point in points)), (0, 0, 1, 0)))
    if description.paper:
        _show(console, "Published", _inline(description.paper))
    if description.equations:
        _show(console, "Equations", _pairs(description.equations.items()))
    network = [NETWORKS[description.network], *([description.network_words] if description.network_words else [])]
    _show(console, "Network", _inline(". ".join(network)))
    own = description.own_fields
    _show(console, "Settings", _settings(own) if own else Text("none of its own"))
    if description.recipe:
        recipe = "\n".join(f"{name}: {as_yaml(value)}" for name, value in description.recipe.items())
        _show(console, "The paper's training (settings of an experiment file)", Text(recipe))
    console.print(_inline(f"`panorgan methods {description.name} --yaml` prints an experiment file with it."))
    console.print()
    _show(console, "Leaves a site", _leaving(description))


def _leaving(description: MethodDescription) -> Group | Text:
    if description.pooled:
        return Text(pooled_words(description))
    sent = Table("stage", "when", "what", "size", box=None, pad_edge=False, header_style="dim")
    for upload in description.sent:
        sent.add_row(upload.stage, upload.rounds, _inline(upload.words), size_words(upload))
    others = [  # not a mapping: a number and a tensor may share a pattern
        *description.tensors.items(),
        *((number, f"(a number) {words}") for number, words in description.numbers.items()),
        *((f"with {variant.setting}", variant_words(variant.sent)) for variant in description.variants),
    ]
    size = Text("Size: the mean over the sites of an example federation; FedAvg's round is 1.", style="dim")
    return Group(sent, Text(), _pairs(others), Text(), size)


def _show(console: Console, heading: str, content: Group | Table | Text) -> None:
    console.print(Text(heading, style="bold"))
    console.print(Padding(content, (0, 0, 1, 2)))


def _pairs(items: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(max_width=26)
    for left, right in items:
        table.add_row(Text(left, style="cyan"), _inline(right))
    return table


def _settings(fields: Iterable[FieldDescription]) -> Table:
    table = Table("setting", "default", "in the paper", "meaning", box=None, pad_edge=False, header_style="dim")
    table.columns[0].no_wrap = True  # names must not be cut off
    table.columns[1].max_width = table.columns[2].max_width = 16
    for field in fields:
        meaning = _inline(field.meaning)
        meaning.append_text(_inline(f" ({field.type})"))
        table.add_row(Text(field.name, style="cyan"), as_yaml(field.default), Text(field.paper or "–"), meaning)
    return table


def _inline(text: str) -> Text:
    """Text with coloured `code` and italic *words*; square brackets are not markup."""
    shown, end = Text(), 0
    for found in _MARKED.finditer(text):
        shown.append(text[end : found.start()])
        shown.append(found[1] or found[2], style="cyan" if found[1] else "italic")
        end = found.end()
    return shown.append(text[end:])
