"""Drafts a table of cases and an experiment file from surveyed folders, with comments on every label."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from panorgan.anatomy import OwnOrgan, ancestors, children, declare_organs, find_organ
from panorgan.anatomy.catalogue import built_in
from panorgan.config import load_experiment, parse_experiment
from panorgan.data.layouts.base import FoundLabelMap, FoundMasks
from panorgan.data_doctor.guess_organs import in_ml
from panorgan.errors import AnatomyError, ConfigError, DataError
from panorgan.federation.files import write_atomically
from panorgan.printable import one_line
from panorgan.workflows.sources import refusal_of
from panorgan.workflows.survey import LabelFacts, SiteSurvey

EXPERIMENT, TABLE = "experiment.yaml", "cases.csv"
LEAVE_OUT = ("ignore", "-", "")
# Prefix of an organ that the catalogue does not have.
OWN = "+"
# With fewer patients at a site, a random split may leave a part empty.
_FEW_PATIENTS = 10


@dataclass(frozen=True)
class Draft:
    """The written files; `refusal` is the error that training would raise, or empty."""

    experiment: Path
    tables: Mapping[str, Path]
    vocabulary: tuple[str, ...]
    external: tuple[str, ...]
    refusal: str


def parse_labels(texts: Sequence[str], sites: Sequence[str]) -> dict[str, dict[str, str]]:
    """`1=liver,2=spleen` for all sites, `north:1=liver` for one: organ by label, by site."""
    found: dict[str, dict[str, str]] = {site: {} for site in sites}
    for text in texts:
        site, colon, rest = text.partition(":")
        if colon and site not in found:
            raise ConfigError(
                f"There is no site {site!r}.",
                code="unknown-site",
                where=f"--labels {text}",
                why=f"the sites are {', '.join(sites)}",
                fix=f"Write --labels {sites[0]}:1=liver,2=spleen.",
            )
        for entry in filter(None, (part.strip() for part in (rest if colon else text).split(","))):
            name, equals, organ = (part.strip() for part in entry.partition("="))
            if not name or not equals:
                raise ConfigError(
                    f"{entry!r} does not name a label and its organ.",
                    code="bad-labels",
                    where=f"--labels {text}",
                    fix="Write --labels 1=liver,2=spleen, with ids or names of labels on the left.",
                )
            try:
                organ_of(organ)  # before the long reading, not after it
            except AnatomyError as error:
                error.where = f"--labels {text}"
                swapped = organ.isdecimal() and not name.isdecimal()
                own = f" An organ that the catalogue lacks is written {name}={OWN}{organ}."
                error.fix = f"Labels are on the left: {organ}={name}." if swapped else error.fix + own
                raise
            for one in [site] if colon else sites:
                found[one][name] = organ
    return found


def with_given(surveys: Sequence[SiteSurvey], given: Mapping[str, Mapping[str, str]]) -> tuple[SiteSurvey, ...]:
    """The surveys with the organs given by the user, by site and label; an empty organ leaves the label out."""
    matched: set[str] = set()
    found = []
    for survey in surveys:
        labels = {label.name: label for label in survey.labels}
        for key, organ in given.get(survey.site, {}).items():
            name = _label_of(survey, key)
            if name is not None:
                matched.add(key)
                labels[name] = replace(labels[name], organ=organ_of(organ), source="given", why="")
        # An organ that a person named is no guess for another label; two labels would become one organ.
        said = {label.organ for label in labels.values() if label.source == "given"}
        kept = [_unguessed(x) if x.source == "guess" and x.organ in said else x for x in labels.values()]
        found.append(replace(survey, labels=tuple(kept)))
    lost = [(survey, key) for survey in surveys for key in given.get(survey.site, {}) if key not in matched]
    if lost:
        survey, key = lost[0]
        raise ConfigError(
            f"There is no label {key!r}.",
            code="unknown-label",
            where="--labels",
            why=f"the labels of site {survey.site} are {', '.join(_shown(label) for label in survey.labels)}",
            fix="Give ids or names from this list.",
        )
    return tuple(found)


def _unguessed(label: LabelFacts) -> LabelFacts:
    return replace(label, organ="", source="", why="")


def organ_of(text: str) -> str:
    """The organ that the user named; `+name` is one that the catalogue lacks, empty leaves the label out."""
    if text.lower() in LEAVE_OUT:
        return ""
    if text.startswith(OWN):
        declare_organs({text[1:]: OwnOrgan()})
        return text[1:]
    return find_organ(text).name


def _label_of(survey: SiteSurvey, key: str) -> str | None:
    """The label with this name or id."""
    for label in survey.labels:
        if key == label.name or (key.isdecimal() and int(key) in label.ids):
            return label.name
    return None


def _shown(label: LabelFacts) -> str:
    return ", ".join(map(str, label.ids)) or label.name


def organs_of(names: Sequence[str]) -> tuple[str, ...]:
    """The organs that `--organs` names."""
    try:
        return tuple(find_organ(name).name for name in names)
    except AnatomyError as error:
        error.where = f"--organs {','.join(names)}"
        raise


def refuse_existing(out: Path, surveys: Iterable[str]) -> None:
    """Nothing is overwritten, and the folder for the draft is none that cannot be one."""
    if out.exists() and not out.is_dir():
        raise ConfigError(
            "The folder for the draft is a file.",
            code="draft-exists",
            where=str(out),
            fix="Give another folder with --out FOLDER.",
        )
    names = [EXPERIMENT, TABLE, *(f"{site}/{TABLE}" for site in surveys)]
    there = [str(out / name) for name in names if (out / name).exists()]
    if there:
        raise ConfigError(
            "A draft would overwrite a file.",
            code="draft-exists",
            where="\n".join(there),
            fix="Give another folder with --out FOLDER, or move the file away.",
        )


def write_draft(surveys: Sequence[SiteSurvey], out: Path, organs: Sequence[str] = ()) -> Draft:
    """Write tables and experiment file into `out`; `organs` are the organs to segment, by default all known ones."""
    refuse_existing(out, [survey.site for survey in surveys])
    for survey in surveys:
        if not survey.organs:
            raise _nothing_named(survey, len(surveys) > 1)
    vocabulary = vocabulary_of([organ for survey in surveys for organ in survey.organs], organs)
    external = tuple(survey.site for survey in surveys if survey.patients < 2)
    if len(external) == len(surveys):
        raise DataError(
            f"Site {surveys[0].site} has too few patients to train and test on.",
            code="too-few-patients",
            where=str(surveys[0].folder),
            why=f"scans of {surveys[0].patients} patient with labels",
            fix="Give a folder with at least two patients.",
        )
    tables: dict[str, Path] = {}
    for survey in surveys:
        if not survey.layout:
            tables[survey.site] = out / TABLE if len(surveys) == 1 else out / survey.site / TABLE
    path = out / EXPERIMENT
    text = _text(surveys, tables, out, vocabulary, external)
    # Checked before anything is written, with paths that need not exist.
    parse_experiment(yaml.safe_load(text), str(path))
    out.mkdir(parents=True, exist_ok=True)
    for survey in surveys:
        if survey.site in tables:
            write_atomically(tables[survey.site], table_of(survey, tables[survey.site].parent))
    write_atomically(path, text)
    refusal = refusal_of(load_experiment(path))
    said = "" if refusal is None else f"{refusal.what} {refusal.why}. {refusal.fix}".replace(" .", "")
    return Draft(path, tables, vocabulary, external, said)


def _nothing_named(survey: SiteSurvey, several: bool) -> DataError:
    prefix = f"{survey.site}:" if several else ""
    labels = ", ".join(f"{_shown(label)} ({in_ml(label.volume_ml)} ml)" for label in survey.labels if label.cases)
    keys = [str(label.ids[0]) if label.ids else label.name for label in survey.labels if label.cases]
    return DataError(
        f"The labels of site {survey.site} are not recognised.",
        code="labels-unknown",
        where=str(survey.folder),
        why=f"{labels or 'no label is drawn in any case'}"
        + (f"; nothing could be guessed: {survey.troubles[0]}" if survey.troubles else ""),
        fix=f"Say it: --labels {prefix}{','.join(f'{key}=ORGAN' for key in keys[:3]) or '1=ORGAN'} "
        f"(`panorgan organs` lists names; {OWN}name is an organ that it lacks).",
    )


def vocabulary_of(organs: Iterable[str], wanted: Sequence[str] = ()) -> tuple[str, ...]:
    """The organs that the federation segments: a union is replaced by its parts if some site separates them."""
    found = dict.fromkeys(organs)
    if wanted:
        chosen = dict.fromkeys(organs_of(wanted))
        related = {name for organ in found for name in (organ, *ancestors(organ), *children(organ))}
        lacking = [name for name in chosen if name not in related]
        if lacking:
            raise ConfigError(
                f"No folder labels {', '.join(lacking)}.",
                code="organ-not-labelled",
                where="--organs",
                why=f"they label {', '.join(found)}",
                fix="Leave it out, or give a folder that labels it.",
            )
        found = chosen
    named = tuple(found)
    for organ in named:
        parts = _parts(organ)
        if any(other in parts for other in named):
            del found[organ]
            found |= dict.fromkeys(_leaves(organ))
    return tuple(sorted(found))


def _parts(organ: str) -> set[str]:
    """Parts of a union, and their parts."""
    own = children(organ, "part")
    return {*own, *(inner for part in own for inner in _parts(part))}


def _leaves(organ: str) -> list[str]:
    own = children(organ, "part")
    return [leaf for part in own for leaf in _leaves(part)] if own else [organ]


def table_of(survey: SiteSurvey, beside: Path) -> str:
    """The text of `cases.csv`; paths below its folder are relative, so that both can be moved together."""
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    writer.writerow(["case", "image", "label", "annotated", "patient"])
    for case in survey.cases:
        found = case.labels
        if isinstance(found, FoundLabelMap):
            label = place(found.path, beside)
            annotated = ";".join(f"{name}={','.join(map(str, ids))}" for name, ids in found.ids.items())
        else:
            assert isinstance(found, FoundMasks), "other labels are read as their layout"
            label = ""
            annotated = ";".join(f"{name}={place(path, beside)}" for name, path in sorted(found.files.items()))
        writer.writerow([case.name, place(case.image.path, beside), label, annotated, case.image.patient])
    return rows.getvalue()


def place(path: Path, beside: Path) -> str:
    """The path relative to a folder if it lies below it, else absolute."""
    # Not resolved: a link is where the user keeps the scan.
    whole, start = Path(os.path.abspath(path)), Path(os.path.abspath(beside))
    return os.path.relpath(whole, start) if whole.is_relative_to(start) else str(whole)


def _text(
    surveys: Sequence[SiteSurvey],
    tables: Mapping[str, Path],
    out: Path,
    vocabulary: Sequence[str],
    external: Sequence[str],
) -> str:
    """The experiment file, with comments for the person who checks it."""
    own = sorted({organ for survey in surveys for organ in survey.organs if organ not in built_in()})
    name = surveys[0].site if len(surveys) == 1 else "federation"
    lines = [
        "# Drafted by 'panorgan init'. Check what every label is taken for; 'panorgan doctor' reads every scan.",
        f"name: {_flow(name)}",
        *(["organs:", *(f"  {_flow(organ)}: {{}}" for organ in own)] if own else []),
        f"vocabulary: {_flow(list(vocabulary))}",
        "",
        "sites:",
    ]
    for survey in surveys:
        lines += _site(survey, tables.get(survey.site), out, survey.site in external)
    lines += ["", "method: {name: fedavg}  # 'panorgan methods' lists the others"]
    if min(survey.patients for survey in surveys) < _FEW_PATIENTS:
        lines += ["splits: {balanced: true}  # exact shares, because a site has few patients"]
    lines += [
        "",
        "# Voxel size and intensities follow from the scans. The defaults of network and training are for a GPU:",
        "# 'panorgan plan FILE --write' adds network, patch, batch and rounds that suit this machine.",
    ]
    return "\n".join(lines) + "\n"


def _site(survey: SiteSurvey, table: Path | None, out: Path, external: bool) -> list[str]:
    kind = f", {survey.modality}" if survey.modality else ""
    folder = place(table, out) if table else place(survey.folder, out)
    read = one_line(f"drafted from {os.path.abspath(survey.folder)}" if table else f"layout {survey.layout}")
    lines = [
        f"  {_flow(survey.site)}:  # {survey.extent}{kind}; labels " + (", ".join(survey.organs) or "nothing known"),
        f"    folder: {_flow(folder)}  # {read}",
    ]
    if external:
        lines.append("    external: true  # scored, never trained on: training needs two patients")
    named = [label for label in survey.labels if label.organ and label.cases and label.source != "name"]
    if named:
        lines.append("    labels:")
        lines += [f"      {_flow(label.name)}: {_flow(label.organ)}  # {_comment(label)}" for label in named]
    rest = [label for label in survey.labels if not label.organ or not label.cases]
    # A layout's own mask files of unknown structures are left out without being named.
    if all(isinstance(case.labels, FoundMasks) and not case.labels.listed for case in survey.cases):
        rest = [label for label in rest if label.source == "given"]
    # A known organ that none of the cases that were read holds may be in others; a table is made of all of them.
    rest = [label for label in rest if not (label.source == "name" and survey.layout)]
    if rest:
        lines.append(f"    ignore: {_flow([label.name for label in rest])}  # not used:")
        lines += [f"      # {label.name}: {_comment(label)}" for label in rest]
    return lines


def _comment(label: LabelFacts) -> str:
    """Volume and cases of a label, and how its organ was recognised."""
    seen = f"{in_ml(label.volume_ml)} ml, in {label.cases} of {label.looked_at} cases"
    guessed = f"guessed ({label.why}): check it"
    said = {"guess": guessed, "given": "as given" if label.organ else "left out as asked", "": "not recognised"}
    return "; ".join(filter(None, [seen, said.get(label.source, "")]))


def _flow(value: Any) -> str:
    """A value as YAML on one line, quoted where it must be."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
