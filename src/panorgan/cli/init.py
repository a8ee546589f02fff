"""`panorgan init`: look at ordinary folders, name their labels, and draft a table of cases and an experiment file."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from panorgan.cli.console import Console, say, say_lines
from panorgan.cli.doctor import reading
from panorgan.data_doctor.guess_organs import in_ml
from panorgan.errors import AnatomyError, ConfigError

if TYPE_CHECKING:
    from panorgan.workflows.draft import Draft
    from panorgan.workflows.survey import LabelFacts, SiteSurvey

_SOURCES = {"name": "its name", "guess": "guessed", "given": "as given"}
_ASKING = (
    "Which organ is each label? Enter keeps what stands in brackets, '-' leaves the label out; "
    "'panorgan organs' lists names, +name is an organ that the list lacks."
)


@dataclass(frozen=True)
class InitRequest:
    """The options of the command line; `ask` is false where no question may be asked."""

    folders: tuple[Path, ...]
    out: Path
    labels: tuple[str, ...] = ()
    organs: str = ""
    scan_file: str = ""
    label_file: str = ""
    one_site: bool = False
    ask: bool = True
    as_json: bool = False


def run_init(request: InitRequest) -> None:
    """Survey, ask, write, and show what comes next."""
    from panorgan.workflows.draft import organs_of, parse_labels, refuse_existing, with_given, write_draft
    from panorgan.workflows.survey import Choice, check_folder, site_names, survey

    asks = request.ask and not request.as_json and sys.stdin.isatty()
    choice = Choice(request.scan_file, request.label_file, request.one_site)
    # What can be checked before the long reading is: first what was given, then where it goes.
    _refuse_repeated(request.folders)
    names = site_names(request.folders)
    given = parse_labels(request.labels, names)
    organs = [organ.strip() for organ in request.organs.split(",") if organ.strip()]
    if not asks:  # an answer may name an organ of its own
        organs_of(organs)
    for folder in request.folders:
        check_folder(folder, choice)
    refuse_existing(request.out, names)
    with reading() as show:
        surveys = [survey(folder, name, choice, show) for folder, name in zip(request.folders, names, strict=True)]
    surveys = list(with_given(surveys, given))
    console = Console(highlight=False)
    if not request.as_json:
        for one in surveys:
            _show_site(console, one)
    if asks:
        surveys = _asked(surveys)
    draft = write_draft(surveys, request.out, organs)
    steps = _next_steps(draft)
    if request.as_json:
        print(json.dumps(_as_json(surveys, draft, steps)), flush=True)
    else:
        _show_draft(console, surveys, draft, steps)


def _refuse_repeated(folders: Sequence[Path]) -> None:
    """A folder is one site: given twice, its patients would be trained on at one site and tested on at the other."""
    known: set[Path] = set()
    for folder in folders:
        if folder.resolve() in known:
            raise ConfigError(
                "A folder is given twice.", code="folder-twice", where=str(folder), fix="Give each site's folder once."
            )
        known.add(folder.resolve())


def _show_site(console: Console, survey: SiteSurvey) -> None:
    """Show what a folder holds, and a line per label."""
    kind = f", {survey.modality}" if survey.modality else ""
    what = f"layout {survey.layout}" if survey.layout else "no layout: scans and labels paired by name"
    title = f"{survey.site}: {survey.extent}{kind} ({what})"
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table("label", "id")
    for column in ("in cases", "ml (median)"):
        table.add_column(column, justify="right")
    table.add_column("organ", no_wrap=True)
    table.add_column("because")
    drawn = [label for label in survey.labels if label.cases]
    for label in drawn:
        because = _SOURCES.get(label.source, "not recognised") + (f": {label.why}" if label.why else "")
        table.add_row(
            Text(label.name),
            ", ".join(map(str, label.ids)),
            f"{label.cases} of {label.looked_at}",
            in_ml(label.volume_ml),
            Text(label.organ or ("left out" if label.source == "given" else "?")),
            Text(because),
        )
    console.print(table)
    empty = [label.name for label in survey.labels if not label.cases]
    if empty:
        console.print(Text(f"Empty in all cases that were read: {', '.join(empty)}."), soft_wrap=True)
    for note in (*survey.notes, *survey.troubles):
        console.print(Text(note, style="yellow"), soft_wrap=True)


def _asked(surveys: Sequence[SiteSurvey]) -> list[SiteSurvey]:
    """The surveys with the user's answers for labels that neither their name nor an option identifies."""
    found: list[SiteSurvey] = []
    for survey in surveys:
        open_ones = [label for label in survey.labels if label.cases and label.source not in ("name", "given")]
        if open_ones and not found:
            say(_ASKING)
        answers = {label.name: _answer(survey, label) for label in open_ones}
        found.append(replace(survey, labels=tuple(answers.get(label.name, label) for label in survey.labels)))
    return found


def _answer(survey: SiteSurvey, label: LabelFacts) -> LabelFacts:
    """Ask until the answer is an organ; the end of the input keeps what stands there."""
    from panorgan.workflows.draft import organ_of

    while True:
        say_lines(f"{survey.site}, {label.name} ({in_ml(label.volume_ml)} ml) [{label.organ or '-'}]: ")
        line = sys.stdin.readline()
        if not line.strip():
            # An empty line confirms; the end of the input confirms nothing.
            return replace(label, source="given") if line and label.organ else label
        try:
            return replace(label, organ=organ_of(line.strip()), source="given", why="")
        except AnatomyError as error:
            say(f"{error.what} {error.fix}")


def _next_steps(draft: Draft) -> list[str]:
    path = shlex.quote(str(draft.experiment))
    return [f"panorgan doctor {path}", f"panorgan plan {path} --write", f"panorgan train {path}"]


def _show_draft(console: Console, surveys: Sequence[SiteSurvey], draft: Draft, steps: Sequence[str]) -> None:
    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    line(f"Wrote {', '.join(str(path) for path in (*draft.tables.values(), draft.experiment))}")
    line(f"Segments: {', '.join(draft.vocabulary)}")
    guessed = [f"{s.site}: {x.name} = {x.organ}" for s in surveys for x in s.labels if x.source == "guess"]
    if guessed:
        line(f"Guessed from anatomy; check them in {draft.experiment.name}: {'; '.join(guessed)}.", "yellow")
    for survey in surveys:
        left = [label.name for label in survey.labels if label.cases and not label.organ and label.source != "given"]
        if left and (not survey.layout or len(left) < 10):
            line(f"{survey.site}: labels not used: {', '.join(left)}; name them under 'labels' to use them.", "yellow")
    for site in draft.external:
        line(f"{site} has only one patient, so it is scored but not trained on (external).", "yellow")
    if draft.refusal:
        line(f"Training would fail: {draft.refusal}", "red")
    line("Next:")
    for step in steps:
        line(f"  {step}")


def _as_json(surveys: Sequence[SiteSurvey], draft: Draft, steps: Sequence[str]) -> dict[str, object]:
    sites = {
        survey.site: {
            "folder": str(survey.folder),
            "layout": survey.layout or None,
            "table": str(draft.tables[survey.site]) if survey.site in draft.tables else None,
            "cases": len(survey.cases),
            "patients": survey.patients,
            "modality": survey.modality,
            "external": survey.site in draft.external,
            "labels": [{**asdict(label), "ids": list(label.ids)} for label in survey.labels],
            "notes": [*survey.notes, *survey.troubles],
        }
        for survey in surveys
    }
    return {
        "experiment": str(draft.experiment),
        "vocabulary": list(draft.vocabulary),
        "sites": sites,
        "refusal": draft.refusal,
        "next": list(steps),
    }
