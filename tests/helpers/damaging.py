"""Change a single byte of a file, and read it as panorgan does: every kind of file that is written and read back."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from federations import CPU, make_coordinator

from panorgan.config import Experiment
from panorgan.data.file_hashes import FileHashes
from panorgan.data.volume import read_volume
from panorgan.deployment.control import Control, JobNews, read_json
from panorgan.errors import PanorganError
from panorgan.federation.audit import AuditLog, read_log
from panorgan.federation.checkpoint import Checkpoints
from panorgan.federation.coordinator import Coordinator
from panorgan.federation.events import DAMAGED, Event, EventLog, read_events
from panorgan.federation.local_models import load_weights
from panorgan.federation.local_state import LocalState
from panorgan.federation.message_files import open_checked
from panorgan.federation.tensor_store import DiskTensorStore
from panorgan.federation.transports.local import LocalTransport
from panorgan.phantom import write_federation
from panorgan.phantom.config import PhantomConfig
from panorgan.preparation.plan import PlanSettings
from panorgan.preparation.store import Store
from panorgan.preparation.teacher_predictions import TeacherPredictions
from panorgan.workflows.analysis_files import Analysis, PlaceCurvature, read_analysis, write_analysis
from panorgan.workflows.execute import build_workers, train
from panorgan.workflows.model_bundle import load_model
from panorgan.workflows.prepare import prepare
from panorgan.workflows.run import Run
from panorgan.workflows.site_cases import read_sites
from panorgan.workflows.tables import read_metrics

# Every change gets a time of its own: a reader that checks a file once must see that it was replaced.
_times = itertools.count(1_700_000_000_000_000_000, 1_000_000_000)
_HEADER = 2048
RUN = "test-run"


@dataclass(frozen=True)
class Kind:
    """A kind of file. `read` gives all that is read of it; `noticed` says whether that reveals the damage."""

    name: str
    files: tuple[Path, ...]
    read: Callable[[Path], Any]
    noticed: Callable[[Any], bool] = lambda outcome: False


@contextmanager
def one_byte_changed(path: Path, draw: random.Random) -> Iterator[str]:
    """While this is open, one byte is another one; as often in the first two kilobytes as anywhere."""
    original = path.read_bytes()
    place = draw.randrange(min(len(original), _HEADER) if draw.random() < 0.5 else len(original))
    damaged = bytearray(original)
    damaged[place] ^= draw.randrange(1, 256)
    _write(path, bytes(damaged))
    try:
        yield f"{path.name}, byte {place} of {len(original)}: {original[place]:#04x} → {damaged[place]:#04x}"
    finally:
        _write(path, original)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(time := next(_times), time))


def silent_change(kind: Kind, draw: random.Random) -> str:
    """Damage one file of a kind; returns the change if it went undetected though something else was read."""
    path = draw.choice(kind.files)
    expected = kind.read(path)
    assert not kind.noticed(expected), f"{kind.name}: something is wrong before any damage"
    with one_byte_changed(path, draw) as what:
        try:
            found = kind.read(path)
        except PanorganError:
            return ""
        return "" if kind.noticed(found) or found == expected else f"{kind.name}: {what}"


# -- what is read of each kind --------------------------------------------------------------------------------------


def digest(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Type, shape and bits of every tensor, shortened."""
    return {
        key: f"{value.dtype} {list(value.shape)} "
        + hashlib.sha256(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        for key, value in sorted(tensors.items())
    }


def _state(path: Path) -> Any:
    checkpoints = Checkpoints(path.parent)
    state = checkpoints.load_latest()
    assert state is not None
    found = [state, checkpoints.load_best(state)]
    plain = [{k: v for k, v in vars(s).items() if k not in ("weights", "rule")} for s in found]
    tensors = [(digest(s.weights), digest(s.rule.tensors), s.rule.scalars) for s in found]
    return (plain, tensors, checkpoints.peek()), checkpoints.unreadable


def _sites(files: tuple[Path, ...]) -> Callable[[Path], Any]:
    """State and answers of a site; the labels of the answers are those that they bear now."""
    labels = {path: str(open_checked(path).meta["answers"]) for path in files if path.name.startswith("answer")}

    def read(path: Path) -> Any:
        local = LocalState(path.parent)
        saved = local.load()
        own = [label for answer, label in sorted(labels.items()) if answer.parent == path.parent]
        answers = [local.answer_to(RUN, label) for label in own]
        return local.finished(RUN), digest(saved.rule.tensors), digest(saved.optimizer), saved.rule.scalars, answers

    return read


def _message(path: Path) -> Any:
    file = open_checked(path)
    return digest(file.message().tensors), file.scalars, file.meta


def _model(path: Path) -> Any:
    model = load_model(path.parent, CPU)
    return digest(model.network.state_dict()), model.plan, model.inference, model.postprocess, model.card


def run_kinds(folder: Path) -> list[Kind]:
    """The files of a finished run."""
    run = Run(folder)
    tables = tuple(path for name in ("metrics.csv", "local_models.csv") for path in folder.glob(f"*{name}*"))
    beside = {path: folder / path.name.removeprefix(".").removesuffix(".crc32") for path in folder.glob(".*.crc32")}
    return [
        Kind("checkpoint", tuple((folder / "checkpoints").iterdir()), _state, lambda found: bool(found[1])),
        Kind("model", tuple(run.model_folder.iterdir()), _model),
        Kind("manifest", (run.manifest_file,), lambda path: Run(folder).manifest),
        Kind("scores", (*tables, *beside), lambda path: repr(read_metrics(beside.get(path, path)))),
        Kind("events", (run.events_file,), lambda path: list(read_events(path)), _tells_of_damage),
        Kind(
            "local model", tuple(run.local_models_folder.glob("*.safetensors")), lambda path: digest(load_weights(path))
        ),
        Kind("analysis", (run.analysis_file,), lambda path: repr(read_analysis(run))),
        Kind("prediction", tuple(run.predictions_folder.rglob("*.nii.gz")), _scan),
    ]


def _tells_of_damage(events: list[Event]) -> bool:
    return any(event.kind == DAMAGED for event in events)


def _scan(path: Path) -> Any:
    volume = read_volume(path)
    return volume.voxels.tobytes(), volume.affine.tobytes()


def unfinished_kinds(folder: Path) -> list[Kind]:
    """The files of a run that was stopped in the middle of a round: answers, teachers, sites' own state."""
    stores = (folder / "vault", *folder.glob("sites/*/vault/*"))

    def tensor_store(path: Path) -> Any:
        kept = DiskTensorStore(path.parent)
        return {name: digest(kept.get(name)) for name in kept.names()}

    sites = tuple(folder.glob("sites/*/*.safetensors"))
    return [
        Kind(
            "checkpoint of an unfinished run", tuple((folder / "checkpoints").iterdir()), _state, lambda f: bool(f[1])
        ),
        Kind("spooled answer", tuple((folder / "spool").rglob("*.safetensors")), _message),
        Kind("teacher", tuple(path for one in stores for path in one.glob("*.safetensors")), tensor_store),
        # A damaged answer is not given: the request fails with an error.
        Kind("state of a site", sites, _sites(sites), lambda found: None in found[-1]),
    ]


def cache_kinds(experiment: Experiment, cache: Path, folder: Path) -> list[Kind]:
    """Prepared cases, what lies beside them, generated scans. What is damaged is made again.

    Hashes of files that are a moment old are not remembered: `data.file_hashes._SETTLED_SECONDS` should be negative.
    """
    sites = read_sites(experiment, cache, lambda what, done, total: None)
    plan, store = prepare(experiment, cache).plan, Store(cache / "store")
    case = next(case for site in sites for case in site.train)
    stored = store.add(case, plan)
    for path in (cache / "store").glob("*.measured"):
        path.unlink()
    store.measure(case, PlanSettings())
    (measured,) = (cache / "store").glob("*.measured")
    made = folder / "phantom"
    config = PhantomConfig(
        organs=("liver", "spleen"),
        sites=[{"name": "a", "annotated": ["liver"], "cases": 1, "spacing_mm": [40, 40, 40]}],
        field_of_view_mm=(364, 320, 220),
    )
    write_federation(config, made)

    def entry(path: Path) -> Any:
        again = store.add(case, plan)
        foreground = {name: places.tobytes() for name, places in again.foreground.items()}
        return again.image.tobytes(), again.labels.tobytes(), foreground, again.spacing

    def prediction(path: Path) -> Any:
        return _predictions(stored).volume(stored)[0].tobytes()

    def measure(path: Path) -> Any:
        return store.measure(case, PlanSettings()).as_json()

    def phantom(path: Path) -> Any:
        write_federation(config, made, remake=True)
        return {one: one.read_bytes() for one in sorted(made.rglob("*")) if one.is_file()}

    hashes = FileHashes(folder / "hashes")
    hashes.of(case.image)
    prediction(stored.folder)
    entries = tuple(path for path in stored.folder.iterdir() if not path.name.startswith("companion"))
    return [
        Kind("prepared case", entries, entry),
        Kind("teacher's prediction", tuple(stored.folder.glob("companion-damage-*")), prediction),
        Kind("measurement", (measured,), measure),
        Kind("remembered hash", tuple((folder / "hashes").iterdir()), lambda path: hashes.of(case.image)),
        Kind("phantom", tuple(path for path in made.rglob("*") if path.is_file()), phantom),
    ]


def _predictions(stored: Any) -> TeacherPredictions:
    def predict(image: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        return torch.linspace(0, 1, image.numel()).reshape(1, *image.shape)

    return TeacherPredictions([stored], "damage", lambda case: ("spleen",), predict)


def network_kinds(folder: Path) -> list[Kind]:
    """Small files of a federation between machines: what cannot be trusted counts as not there."""
    control = Control(folder / "control")
    control.say_gone("job-1", {"north", "south"})
    JobNews(control.job)(Event("round_started", {"number": 3, "total": 9, "stage": "train"}, 1.0))
    log = AuditLog(folder / "egress-log.jsonl")
    for number in range(3):
        log.append({"kind": "sent", "round": number, "bytes": 1234})
    return [
        Kind("control file", tuple((folder / "control").iterdir()), read_json, lambda found: not found),
        Kind("egress log", (log.path,), read_log, lambda found: not found[0].ok),
    ]


# -- runs to damage -------------------------------------------------------------------------------------------------


def make_finished(experiment: Experiment, folder: Path, cache: Path) -> None:
    """A finished run with all that a run can hold."""
    train(experiment, folder, cache=cache)
    curvature = PlaceCurvature("north", 0.5, 0.25, (3.0, 2.0, 1.0), 7.0, 0.5)
    write_analysis(Run(folder), Analysis({"run": "x"}, (curvature,), None, ()))


def make_unfinished(experiment: Experiment, folder: Path, cache: Path) -> None:
    """Stopped when all answers of the last round had come, before they were averaged."""
    workers = build_workers(experiment, prepare(experiment, cache), Run(folder), CPU, EventLog())
    coordinator = make_coordinator(experiment, folder, LocalTransport(workers))
    coordinator.run(len(coordinator.schedule) - 1)
    coordinator.rule.aggregate = _interrupted  # type: ignore[method-assign]
    try:
        coordinator.run()
    except KeyboardInterrupt:
        return
    raise AssertionError("the round was not interrupted")


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@contextmanager
def stop_in_round(number: int) -> Iterator[None]:
    """A run in here ends when the sites have trained for a round, before it is validated and kept."""
    original = Coordinator._validate

    def validate(self: Coordinator, round_info: Any, traffic: Any) -> Any:
        return _interrupted() if round_info.round == number else original(self, round_info, traffic)

    Coordinator._validate = validate  # type: ignore[method-assign]
    try:
        yield
    except KeyboardInterrupt:
        return
    finally:
        Coordinator._validate = original  # type: ignore[method-assign]
    raise AssertionError("the run was not stopped")


def files_of_run(folder: Path) -> list[Path]:
    """All files of a run that hold something and are read back, relative to its folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    return [path.relative_to(folder) for path in files if "tensorboard" not in path.parts]


def resume_damaged(
    experiment: Experiment, folder: Path, file: Path, undisturbed: Path, cache: Path, draw: random.Random
) -> tuple[str, str]:
    """Change one byte in a stopped run and resume it: `same`, `error` or `silent`, and what was changed."""
    with one_byte_changed(folder / file, draw) as what:
        try:
            train(experiment, folder, resume=True, cache=cache)
        except PanorganError:
            return "error", what
        names = ("model/model.safetensors", "metrics.csv")
        same = all((folder / name).read_bytes() == (undisturbed / name).read_bytes() for name in names)
    return "same" if same else "silent", what
