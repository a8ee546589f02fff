"""A run, or a comparison of runs: scored test cases, their reference labels, and what the models predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from panorgan.anatomy import Vocabulary
from panorgan.anatomy.catalogue import added
from panorgan.data.case import Case, LabelMap
from panorgan.errors import RunError
from panorgan.evaluation.inference import knows, label_ids
from panorgan.viewer.study import Pane, Scan, Study, ViewedCase, finite
from panorgan.workflows.run import Run
from panorgan.workflows.site_cases import cache_folder, read_sites

Key = tuple[str, str]
_COMPARISON = "comparison.html"
_ABLATION = "ablation.html"


def view_run(folder: Path, cache: Path | None = None) -> Study:
    """The test cases of a run: prediction, and reference."""
    run = Run(folder)
    cases = _scored_cases(run, cache)
    page = run.report_file if run.report_file.is_file() else None
    viewed = [_viewed(key, case, [("Prediction", run)]) for key, case in cases.items()]
    place, shown = run.path.resolve(), tuple(case for case in viewed if case)
    return Study(f"{place.parent.name}/{place.name}", "run", shown, page, run.organs, dict(added()))


def runs_below(folder: Path) -> dict[str, Run]:
    """The finished run of the first seed of every method, by the method's folder."""
    found: dict[str, Run] = {}
    for manifest in sorted(folder.glob("*/*/manifest.json"), key=lambda path: (path.parent.parent.name, _seed(path))):
        run = Run(manifest.parent)
        if run.complete:
            found.setdefault(manifest.parent.parent.name, run)
    return found


def view_comparison(folder: Path, cache: Path | None = None) -> Study:
    """The test cases with the predictions of all methods, each of its first seed."""
    runs = runs_below(folder)
    if not runs:
        raise RunError(
            "The comparison holds no finished run.",
            code="no-finished-run",
            where=str(folder),
            fix="Finish it with 'panorgan compare', or look at a folder of scans: panorgan view FOLDER.",
        )
    first = next(iter(runs.values()))
    panes = list(runs.items())
    cases = _scored_cases(first, cache)
    page = next((folder / name for name in (_COMPARISON, _ABLATION) if (folder / name).is_file()), None)
    note = f"first seed of each method ({first.path.name})"
    viewed = [_viewed(key, case, panes, note) for key, case in cases.items()]
    shown = tuple(case for case in viewed if case)
    return Study(folder.resolve().name, "comparison", shown, page, first.organs, dict(added()))


def _seed(manifest: Path) -> tuple[int, str]:
    name = manifest.parent.name
    digits = "".join(c for c in name if c.isdigit())
    return (int(digits) if digits else 0, name)


def _scored_cases(run: Run, cache: Path | None) -> dict[Key, Case]:
    """The scored cases with the labels they were scored with, by site and id."""
    scored = {(row["site"], row["case"]) for row in run.scores}
    sites = read_sites(run.experiment, cache or cache_folder(), lambda what, done, total: None)
    found = {(site.name, case.id): case for site in sites for case in site.test if (site.name, case.id) in scored}
    if not found:
        raise RunError(
            "None of this run's scored cases is in its data folders.",
            code="no-scored-cases",
            where=str(run.path),
            why=f"{len(scored)} cases were scored" if scored else "it has no test cases",
            fix="Put the data back where the experiment says, or look at a folder of scans: panorgan view FOLDER.",
        )
    return found


def _viewed(key: Key, case: Case, runs: Sequence[tuple[str, Run]], note: str = "") -> ViewedCase | None:
    """One case with a pane per run and one for the reference; None where no run kept its prediction."""
    scan = Scan(case.image, case.slices)
    panes = []
    for title, run in runs:
        labels = predicted_labels(run, key)
        if labels is None:
            continue
        own = ((row["organ"], row["dice"]) for row in run.scores if (row["site"], row["case"]) == key)
        panes.append(Pane(title, scan, labels, dice=finite(own)))
    if case.labels is not None:
        panes.append(Pane("Reference", scan, case.labels, reference=True))
    return ViewedCase(case.id, tuple(panes), case.site, note, runs[0][1].is_ct or None) if panes else None


def predicted_labels(run: Run, key: Key) -> LabelMap | None:
    """The prediction of one case; None where it was removed."""
    site, case = key
    path = run.predictions_folder / site / f"{case}.nii.gz"
    return LabelMap(path, *_meaning(run.vocabulary, run.organs)) if path.is_file() else None


def _meaning(vocabulary: Vocabulary, organs: Sequence[str]) -> tuple[dict[str, tuple[int, ...]], frozenset[int]]:
    """The integers of every organ, what lies inside it included, and of unions such as both kidneys."""
    ids = label_ids(vocabulary)
    names = {
        organ: tuple(ids[member] for member in vocabulary.members(organ))
        for organ in organs
        if knows(vocabulary, organ)
    }
    return names, frozenset(ids.values())
