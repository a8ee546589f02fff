"""Masks that are annotated and empty: absent, or never looked at? Only a person can decide."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from panorgan.anatomy import ancestors, catalogue
from panorgan.data.layouts.base import FoundLabelMap, FoundMasks
from panorgan.data_doctor.codes import finding
from panorgan.data_doctor.findings import CaseFacts, Finding, Source
from panorgan.data_doctor.read_case import CaseTask

Tasks = Mapping[tuple[str, str], CaseTask]
"""What is known about every case besides what was read, by site and case."""

_NAME_EACH = 3
_WHY = "annotated but empty: is it absent, or was it not annotated? It is taken as absent"


def find_empty(source: Source, cases: Sequence[CaseFacts], tasks: Tasks) -> Iterator[Finding]:
    """One line per case while they are few, else one per structure; an empty label is one line."""
    blank = [facts for facts in cases if len(facts.structures) > 1 and not any(s.voxels for s in facts.structures)]
    if len(blank) == len(cases):
        blank = []  # then every structure is reported as never annotated
    reported = {facts.case for facts in blank}
    for facts in blank:
        yield _blank(facts, tasks[facts.site, facts.case])
    empty: dict[str, list[CaseFacts]] = defaultdict(list)
    drawn: set[str] = set()
    for facts in cases:
        for structure in facts.structures:
            if structure.voxels:
                drawn.add(structure.name)
            elif facts.case not in reported:
                empty[structure.name].append(facts)
    for name, without in sorted(empty.items()):
        about = [tasks[facts.site, facts.case] for facts in without]
        if name not in drawn:
            yield _never(source, name, about)
        elif len(without) <= _NAME_EACH and catalogue()[name].kind not in ("tumour", "cyst"):
            for facts, task in zip(without, about, strict=True):
                files = facts.label_files
                file = files[0] if len(files) == 1 else ""
                what = f"The {name} mask is empty."
                yield finding("empty-mask", source.site, facts.case, what, _WHY, _fix(task, name), file, name)
        else:
            listed = ", ".join(facts.case for facts in without[:5]) + (" …" if len(without) > 5 else "")
            what = f"The {name} mask is empty in {len(without)} of {len(cases)} cases: {listed}."
            yield finding("empty-mask", source.site, "", what, _WHY, _fix(about[0], name), "", name)


def _never(source: Source, name: str, tasks: Sequence[CaseTask]) -> Finding:
    names = sorted({own for task in tasks for own in _folder_names(task, name)})
    return finding(
        "never-annotated",
        source.site,
        "",
        f"{name} is declared, but drawn in none of {len(tasks)} cases.",
        "training would learn that it is absent everywhere",
        f"If it was not annotated here, leave it out under the site: 'ignore: [{', '.join(names)}]'.",
        source.folder,
        name,
    )


def _blank(facts: CaseFacts, task: CaseTask) -> Finding:
    return finding(
        "empty-mask",
        facts.site,
        facts.case,
        f"All {len(facts.structures)} masks are empty.",
        "the label was never drawn, or saved before it was; everything is taken as absent",
        f"If it was not annotated, leave the case out under the site: 'leave_out: [{task.case}]'.",
        facts.label_files[0] if facts.label_files else "",
    )


def _fix(task: CaseTask, organ: str) -> str:
    """What makes the organ unknown in this case."""
    names = _folder_names(task, organ)
    if isinstance(task.labels, FoundMasks):
        files = ", ".join(str(task.labels.files[name]) for name in names if name in task.labels.files)
        return f"If absent, leave it. If not annotated, remove its file: {files}."
    if isinstance(task.labels, FoundLabelMap):
        return f"If absent, leave it. If not annotated, list the case without it in a cases.csv: {_row(task, names)}"
    return f"If absent, leave it. If not annotated, remove its segment: {', '.join(names)}."


def _row(task: CaseTask, without: Sequence[str]) -> str:
    """A row of the table that names everything but these; the other ids must still be declared."""
    if not isinstance(task.labels, FoundLabelMap):
        return ""
    kept = [f"{name}={','.join(map(str, ids))}" for name, ids in task.labels.ids.items() if name not in without]
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(
        [task.case, task.image.resolve(), task.labels.path.resolve(), ";".join(kept)]
    )
    return text.getvalue()


def _folder_names(task: CaseTask, organ: str) -> list[str]:
    """What the folder calls the organ, or else its parts."""
    own_names = [name for name, own in task.organs.items() if own == organ]
    return own_names or [name for name, own in task.organs.items() if organ in ancestors(own)]
