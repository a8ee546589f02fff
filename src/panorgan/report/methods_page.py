"""docs/methods.md, written from the registry: an overview, and a section for every method."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from panorgan.federation.egress import COMMON_NUMBERS
from panorgan.methods.about.metadata import TRAIN, FieldDescription, MethodDescription, describe, fields_of
from panorgan.methods.about.uploads import EXAMPLE_SITES, Upload
from panorgan.methods.about.words import NETWORKS, as_yaml, body, by_group, pooled_words, size_words, variant_words
from panorgan.methods.base import MethodConfig
from panorgan.methods.registry import methods

COMMAND = "panorgan methods --markdown > docs/methods.md"


def methods_page() -> str:
    """The whole page, for the methods that come with panorgan."""
    described = [describe(m) for m in methods().values() if m.__module__.startswith("panorgan.")]
    sites = "; ".join(f"{site}: {', '.join(organs)}" for site, organs in EXAMPLE_SITES.items())
    lines = [
        "# Methods",
        "",
        f"<!-- Generated: {COMMAND} -->",
        "",
        *_paragraph(
            "Every method that comes with panorgan, from its own file: what it is, which equations of its paper are "
            "computed where, its settings with the published values, and what leaves a site. An experiment file "
            "chooses one under `method`. `panorgan methods NAME` shows the same in a terminal."
        ),
        "",
        *(line for title, members in by_group(described).items() for line in _group(title, members)),
        *_paragraph(
            "*Network*: how organs are separated. An organ and its tumour are a group and share a part. "
            "*Sent per round*: the size of what leaves a site, relative to FedAvg. Measured with default settings and "
            f"the default network on an example federation of three sites ({sites}); the mean over the sites. "
            "*Pooled data*: all cases are in one place, so nothing is sent. For benchmarks only."
        ),
        "",
        "## What every method has",
        "",
        *_field_table(fields_of(MethodConfig)),
        "",
        "A section names those of them that a method gives another default or that its paper fixes.",
        "",
        "**Leaves a site, whatever the method**: numbers, when it joins and when it scores the model.",
        "",
        *(f"- `{name}`: {what}" for name, what in COMMON_NUMBERS.items()),
        "",
        "A site's own `local/egress.yaml` decides what may leave; see [deploy.md](deploy.md).",
    ]
    for description in described:
        lines += ["", *_section(description)]
    return "\n".join(lines) + "\n"


def method_section(description: MethodDescription) -> str:
    """The part of the page that is about one method."""
    return "\n".join(_section(description)) + "\n"


def stages_in_words(description: MethodDescription) -> str:
    """Stages besides training; those that a setting adds are marked."""
    extra = [stage for stage in description.stages if stage != TRAIN]
    return ", ".join([*extra, *(f"{stage} (optional)" for stage in description.optional_stages)])


def sent_in_figures(description: MethodDescription) -> str:
    """How much leaves a site, relative to FedAvg: per round of training, and what other stages add."""
    main = [upload for upload in description.sent if upload.stage == TRAIN]
    others = [upload for upload in description.sent if upload.stage != TRAIN and upload.size]
    added = [f" + {_figure(upload)} in {upload.stage}" for upload in others]
    return "; ".join(_figure(upload) for upload in main) + "".join(added)


def paper_link(paper: str) -> str:
    """Text with arXiv numbers as links."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)


def _figure(upload: Upload) -> str:
    when = "" if upload.rounds == "every round" else " once" if _is_one_round(upload) else f" in {upload.rounds}"
    return f"{size_words(upload)}{when}"


def _is_one_round(upload: Upload) -> bool:
    return upload.rounds in ("once", "last round", "first round")


def _group(title: str, members: Iterable[MethodDescription]) -> list[str]:
    head = ("method", "what it is", "network", "stages besides training", "sent per round", "pooled data")
    return [f"**{title}**", "", *_table(head, map(_overview, members)), ""]


def _overview(description: MethodDescription) -> Sequence[str]:
    anchor = re.sub(r"[^\w\- ]", "", _heading(description).lower()).replace(" ", "-")
    return (
        f"[`{description.name}`](#{anchor})",
        description.summary,
        NETWORKS[description.network],
        stages_in_words(description),
        sent_in_figures(description),
        "yes" if description.pooled else "",
    )


def _heading(description: MethodDescription) -> str:
    return f"{description.title} (`{description.name}`)"


def _section(description: MethodDescription) -> list[str]:
    lines = [f"## {_heading(description)}", "", body(description), ""]
    if description.paper:
        lines += [f"**Published**: {paper_link(description.paper)}", ""]
    if description.equations:
        lines += ["**Equations**", "", *(f"- {place}: {what}" for place, what in description.equations.items()), ""]
    network = NETWORKS[description.network]
    more = f". {description.network_words}" if description.network_words else ""
    lines += [f"**Network**: {network}{more}", "", "**Settings**", ""]
    own = description.own_fields
    lines += _field_table(own) if own else ["None besides those that every method has."]
    if description.recipe:
        settings = (f"{name}: {as_yaml(value)}" for name, value in description.recipe.items())
        lines += ["", "**As the paper trained**", "", *(f"- `{setting}`" for setting in settings)]
    return [*lines, "", *_leaving(description)]


def _leaving(description: MethodDescription) -> list[str]:
    if description.pooled:
        return [f"**Leaves a site**: {pooled_words(description)}"]
    rows = [(s.stage, s.rounds, s.words, size_words(s)) for s in description.sent]
    lines = ["**Leaves a site**", "", *_table(("stage", "when", "what", "size (FedAvg's is 1)"), rows), ""]
    lines += [f"- `{pattern}`: {sentence}" for pattern, sentence in description.tensors.items()]
    lines += [f"- number `{pattern}`: {words}" for pattern, words in description.numbers.items()]
    lines += [f"- with `{variant.setting}`: {variant_words(variant.sent)}" for variant in description.variants]
    return lines


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, width=120, break_long_words=False, break_on_hyphens=False)


def _field_table(fields: Iterable[FieldDescription]) -> list[str]:
    rows = ((f"`{f.name}`", f.type, f"`{as_yaml(f.default)}`", f.paper or "–", f.meaning) for f in fields)
    return _table(("setting", "type", "default", "in the paper", "meaning"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; a bar inside a cell is escaped."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |".replace("  |", " |") for row in [head, ["---"] * len(head), *cells]]
