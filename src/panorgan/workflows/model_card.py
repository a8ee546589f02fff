"""`CARD.md` of a model: what it was trained on, by whom, its results by site, and what it was never tested on.

Every number comes from the model's `model.json` and the files of its run; the card says nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panorgan.anatomy import Vocabulary, catalogue
from panorgan.evaluation.forgetting import covered_organs
from panorgan.evaluation.statistics import EXTERNAL_SPLIT, TEST_SPLIT, Summary, organ_site_table
from panorgan.federation.files import write_atomically
from panorgan.printable import one_line

if TYPE_CHECKING:
    from panorgan.workflows.run import Run

CARD = "CARD.md"
INPUT_CHANNELS = "input_channels"
"""Key in `model.json` of a scan's channels, in order; absent if the experiment names none."""
LOW_DICE = 0.7
"""Organs with a lower mean Dice are named among the limits."""
_NOT_MEASURED, _UNKNOWN, _FEW = "not measured", "–", "too few cases"
_MARKS = {True: "annotated", False: "–"}


def write_card(run: Run) -> Path:
    """Write the card of a finished run next to its model."""
    target = run.model_folder / CARD
    write_atomically(target, model_card(run.card, run))
    return target


def model_card(card: Mapping[str, Any], run: Run | None = None) -> str:
    """The card as Markdown, from `model.json` and, where it is known, the run."""
    scored = run if run is not None and run.complete else None
    trained = run if run is not None and run.started else None
    parts = [
        _head(card),
        _training_data(card, trained),
        _annotations(card),
        _method(card),
        _results(scored),
        _limits(card, scored),
        _versions(card, trained),
        _licences(trained),
    ]
    return "\n\n".join(parts) + "\n"


def _head(card: Mapping[str, Any]) -> str:
    organs = ", ".join(_title(organ) for organ in card["organs"])
    size = " × ".join(f"{mm:g}" for mm in card["plan"]["spacing_mm"])
    parameters = card.get("parameters")
    counted = f"{parameters:,}" if isinstance(parameters, int) else "unknown"
    return (
        f"# {_word(card.get('name', 'model'))}\n\n"
        f"Segments {len(card['organs'])} structures in {_modality(card)} scans: {organs}. Trained with panorgan and "
        f"the method `{card['method']['name']}` on cases of {len(card['sites'])} sites.\n\n"
        f"{_channels(card)}"
        f"- Network: {card['network']['dimensions']}D U-Net, {counted} parameters, {_organ_parts(card)}\n"
        f"- Voxels: {size} mm (R, A, S), windows of {' × '.join(map(str, card['inference']['patch_size']))} voxels\n"
        f"- Run: {_word(card.get('run', 'unknown'))}, weights of round {_word(card.get('round', 'unknown'))}\n\n"
        "Research software: not a medical device, not for diagnosis."
    )


def _channels(card: Mapping[str, Any]) -> str:
    """A line about the channels if a scan has several."""
    names = card.get(INPUT_CHANNELS) or ()
    return f"- Channels of a scan, in this order: {', '.join(map(_word, names))}\n" if len(names) > 1 else ""


def _training_data(card: Mapping[str, Any], run: Run | None) -> str:
    rows = []
    manifest = run.manifest if run is not None else {}
    for name, facts in sorted(card["sites"].items()):
        measured = manifest.get("statistics", {}).get(name, {})
        scans = _scans(measured) if manifest else (_UNKNOWN, _UNKNOWN)
        rows.append([_word(name), str(facts["train_cases"]), _cases(manifest, name), *scans])
    for name, site in sorted(manifest.get("sites", {}).items()):
        if site["external"]:
            rows.append(
                [f"{_word(name)} (external, never trained on)", "0", _cases(manifest, name), _UNKNOWN, _UNKNOWN]
            )
    names = ["Site", "Training cases", "Validation / test cases", "CT among the training cases", "Median voxel (mm)"]
    stated = manifest and not any(manifest.get("statistics", {}).values())
    why = "\n\nThe experiment states the whole plan, so the sites measured nothing for it." if stated else ""
    return f"## Trained on\n\n{_table(names, rows)}{why}"


def _cases(manifest: Mapping[str, Any], site: str) -> str:
    cases = manifest.get("sites", {}).get(site, {}).get("cases")
    return f"{cases['validation']} / {cases['test']}" if cases else _UNKNOWN


def _scans(measured: Mapping[str, float]) -> tuple[str, str]:
    """The site's measurements: how many scans were CT, and their median voxel. With a fixed plan there are none."""
    spacing = [measured.get(f"plan/spacing_mm/{axis}") for axis in "RAS"]
    voxel = " × ".join(f"{mm:.3g}" for mm in spacing if mm is not None)
    cases = measured.get("plan/cases")
    ct = f"{measured.get('plan/ct_cases', 0):.0f} of {cases:.0f}" if cases else _NOT_MEASURED
    return ct, voxel or _NOT_MEASURED


def _annotations(card: Mapping[str, Any]) -> str:
    vocabulary, sites = Vocabulary(card["organs"]), sorted(card["sites"])
    covered = {site: covered_organs(card["sites"][site]["annotated"], vocabulary) for site in sites}
    rows = [[_title(organ), *(_MARKS[organ in covered[site]] for site in sites)] for organ in card["organs"]]
    counts = [
        f"- {_word(site)}: "
        + ", ".join(
            f"{_title(s)} ({n} training case{'s' * (n != 1)})"
            for s, n in sorted(card["sites"][site]["annotated"].items())
        )
        for site in sites
    ]
    return "## Annotated by\n\n" + _table(["Organ", *map(_word, sites)], rows) + "\n\n" + "\n".join(counts)


def _method(card: Mapping[str, Any]) -> str:
    settings = {name: value for name, value in card["method"].items() if name != "name"}
    plan = {name: value for name, value in card["plan"].items() if name != "window_hu" or _is_window(card)}
    blocks = {"method": settings, "network": card["network"], "plan": plan, "inference": card["inference"]}
    lines = "\n".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in blocks.items())
    cleaning = card.get("postprocess", "none")
    return (
        f"## Method\n\n`{card['method']['name']}`, with these settings; post-processing: {cleaning}."
        f"\n\n```yaml\n{lines}\n```"
    )


def _results(run: Run | None) -> str:
    if run is None:
        return "## Results\n\nNot scored here: the files of the run, or its scores, are not with the model."
    inside, outside = _dice(run, TEST_SPLIT), _dice(run, EXTERNAL_SPLIT)
    rows = [[_title(organ), *_cell(inside.get(organ)), *_cell(outside.get(organ))] for organ in run.organs]
    words = (
        "Mean Dice of the test cases, which were not trained on, against the sites' own annotations, with 95 % "
        "bootstrap intervals over cases; all other metrics are in `metrics.csv` and the report."
    )
    names = ["Organ", "Federation", "95 % interval", "Cases", "External sites", "95 % interval", "Cases"]
    return f"## Results\n\n{words}\n\n{_table(names, rows)}"


def _dice(run: Run, split: str) -> dict[str, Summary]:
    # Taken alone, external sites are summarised per organ exactly as the federation is.
    rows = [{**row, "split": TEST_SPLIT} for row in run.scores if row["split"] == split]
    return organ_site_table(rows, "dice").organs


def _cell(summary: Summary | None) -> tuple[str, str, str]:
    if summary is None or not summary.n:
        return "not scored", _UNKNOWN, "0"
    known = not math.isnan(summary.low) and summary.low != summary.high
    interval = f"{summary.low:.2f} to {summary.high:.2f}" if known else _FEW
    return f"{summary.mean:.2f}", interval, str(summary.n)


def _limits(card: Mapping[str, Any], run: Run | None) -> str:
    plan = card["plan"]
    if _is_window(card):
        low, high = plan["window_hu"]
        seen = f"CT in Hounsfield units, clipped to {low:g} to {high:g} HU. Other modalities are untested."
    else:
        seen = "Intensities are standardised by each scan's own mean and spread (as for MR); CT is untested."
    cases = sum(site["train_cases"] for site in card["sites"].values())
    lines = [
        seen,
        f"It saw {cases} training cases of {len(card['sites'])} sites. Which patients those were (age, sex, disease, "
        "scanner) is not recorded here; ask the sites.",
        "A structure outside the list above is never segmented; a voxel has one label.",
    ]
    if run is None:
        return "## Limits\n\n" + _bullets([*lines, "Its accuracy is not stated: it was not scored here."])
    inside, outside = _dice(run, TEST_SPLIT), _dice(run, EXTERNAL_SPLIT)
    low_ones = {organ: s for organ, s in inside.items() if s.n and s.mean < LOW_DICE}
    if low_ones:
        named = ", ".join(f"{_title(organ)} ({summary.mean:.2f})" for organ, summary in sorted(low_ones.items()))
        lines.append(f"Mean test Dice below {LOW_DICE}: {named}.")
    for place, table in (("in the federation", inside), ("at external sites", outside)):
        missing = [_title(organ) for organ in card["organs"] if organ not in table]
        if len(missing) == len(card["organs"]):
            lines.append(f"Nothing was scored {place}.")
        elif missing:
            lines.append(f"Not scored {place}: {', '.join(missing)}.")
    return "## Limits\n\n" + _bullets(lines)


def _versions(card: Mapping[str, Any], run: Run | None) -> str:
    known = dict(run.manifest.get("versions", {})) if run is not None else {}
    known.setdefault("panorgan", card.get("panorgan", "unknown"))
    return "## Software\n\n" + ", ".join(f"{name} {_word(version)}" for name, version in sorted(known.items()))


def _licences(run: Run | None) -> str:
    lines = [f"{_word(site)}: {licence}" for site, licence in data_licences(run).items()]
    stated = _bullets(lines) if lines else "The data folders are not known here, so no licence of the data is stated."
    return f"## Licence of the data, as stated with it\n\n{stated}"


def data_licences(run: Run | None) -> dict[str, str]:
    """The licence of each site's data, from its `dataset.json` or the note of `panorgan fetch`."""
    if run is None:
        return {}
    experiment = run.manifest.get("experiment", {})
    phantom = experiment.get("phantom")
    if phantom:
        return {site["name"]: "generated by panorgan, no patient's data" for site in phantom["sites"]}
    sites = experiment.get("sites") or {}
    return {name: _stated(Path(site["folder"])) for name, site in sorted(sites.items()) if "folder" in site}


def _stated(folder: Path) -> str:
    try:
        content = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
        found = content.get("licence") or content.get("license")
        if isinstance(found, str) and found.strip():
            return _word(found)
    except (OSError, ValueError, AttributeError):
        pass
    try:
        note = folder.with_name(f"{folder.name}.licence.txt").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return "not stated"
    lines = [line.partition(":")[2] for line in note.splitlines() if line.startswith("Licence:")]
    return _word(lines[0]) if lines else "not stated"


def _modality(card: Mapping[str, Any]) -> str:
    return "CT" if _is_window(card) else "MR (or other)"


def _is_window(card: Mapping[str, Any]) -> bool:
    return bool(card["plan"]["intensity"] == "window")


def _organ_parts(card: Mapping[str, Any]) -> str:
    kind = card["network"].get("organs", "channels")
    return "organs as channels" if kind == "channels" else f"a part per organ ({kind})"


def _title(structure: str) -> str:
    return _word(catalogue()[structure].title)


def _word(text: object) -> str:
    """Untrusted text on one line, escaped so that it cannot act as Markdown or HTML."""
    plain = one_line(str(text)).strip()
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#&" else c for c in plain)


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)
