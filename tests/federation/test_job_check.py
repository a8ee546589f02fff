"""What a participant makes of a job: one form is accepted, and every other is refused, whatever it would do."""

from __future__ import annotations

import io
import json
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the network extra is not installed")

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.job_launcher_spec import JobProcessArgs
from nvflare.apis.workspace import Workspace
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE
from nvflare.private.defs import SysCommandTopic, TrainingTopic
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from panorgan.federation.transports.nvflare import launcher, site_process
from panorgan.federation.transports.nvflare.job_check import JobValidator, SiteDeployer
from panorgan.federation.transports.nvflare.jobs import CONTROLLER, EXECUTOR, write_job
from panorgan.federation.transports.nvflare.policies import (
    SERVER_CLASSES,
    SITE_CLASSES,
    is_plain_connection,
    site_policies,
)
from panorgan.federation.transports.nvflare.storage import KitStorage

SITE, SERVER = "config_fed_client.json", "config_fed_server.json"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A job's folder as a participant unpacks it, with the files of its signature."""
    folder = write_job(tmp_path / "job", "job", CONTROLLER, EXECUTOR, 1) / "app"
    for place in (folder, folder / "config"):
        for name in (NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE):
            (place / name).write_text("{}")
    return folder


def refused(app: Path) -> bool:
    return bool(JobValidator().validate(str(app))[0])


def test_a_job_of_ours_is_accepted(app: Path) -> None:
    assert JobValidator().validate(str(app)) == ("", {})


def executor(config: dict[str, Any], **changes: Any) -> None:
    config["executors"][0]["executor"].update(changes)


NESTED = {"path": "panorgan.deployment.kits._write", "args": {}}
SAID: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "a longer name": (SITE, lambda it: executor(it, path=f"{EXECUTOR}.open_site")),
    "a name that begins the same": (SITE, lambda it: executor(it, path=f"{EXECUTOR}Evil")),
    "the controller at a site": (SITE, lambda it: executor(it, path=CONTROLLER)),
    "an argument": (SITE, lambda it: executor(it, args={"kit": "/"})),
    "a component in an argument": (SITE, lambda it: executor(it, args={"kit": NESTED})),
    "class attributes": (SITE, lambda it: executor(it, args={"class_attributes": {}})),
    "a second name for the class": (SITE, lambda it: executor(it, class_path="os.system")),
    "a component": (SITE, lambda it: it.update(components=[{"id": "x", **NESTED}])),
    "a filter": (SITE, lambda it: it.update(task_result_filters=[{"tasks": ["*"], "filters": [NESTED]}])),
    "two executors": (SITE, lambda it: it["executors"].append(it["executors"][0])),
    "a setting of the engine": (SITE, lambda it: it.update(decomposer_module="evil")),
    "a text where seconds belong": (SITE, lambda it: it.update(default_task_fetch_interval="{JOB_CUSTOM_DIR}")),
    "a component where seconds belong": (SITE, lambda it: it.update(default_task_fetch_interval=NESTED)),
    "seconds without end": (SITE, lambda it: it.update(submit_task_result_timeout=float("inf"))),
    "less than no seconds": (SITE, lambda it: it.update(submit_task_result_timeout=-1.0)),
    "a longer name at the server": (SERVER, lambda it: it["workflows"][0].update(path=f"{CONTROLLER}.run_segment")),
    "an argument at the server": (SERVER, lambda it: it["workflows"][0].update(args={"x": NESTED})),
    "a component at the server": (SERVER, lambda it: it.update(components=[{"id": "x", **NESTED}])),
}


@pytest.mark.parametrize("kind", SAID)
def test_a_job_that_says_anything_else_is_refused(kind: str, app: Path) -> None:
    name, change = SAID[kind]
    path = app / "config" / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=1))
    assert refused(app)


WRITTEN: dict[str, Callable[[str], str]] = {
    "a key twice, of which another reader may take the first": lambda text: text.replace(
        '"executors"', '"executors": [],\n "executors"'
    ),
    "a comment": lambda text: text.replace("{", "{ // evil\n", 1),
    "more behind it": lambda text: text + " ",
    "an include of another kind of file": lambda text: 'include "evil.conf"\n' + text,
    "nothing": lambda text: "",
    "no JSON object": lambda text: "[]",
    "a tower": lambda text: "[" * 9_000,
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_the_text_counts_and_not_only_what_we_read_in_it(kind: str, app: Path) -> None:
    path = app / "config" / SITE
    path.write_text(WRITTEN[kind](path.read_text()))
    assert refused(app)


@pytest.mark.parametrize(
    "name",
    [
        "custom/x.py",
        "x.py",
        "config/config_fed_client.conf",
        "config/config_fed_client.json.default",
        "config/log_config.json",
    ],
)
def test_a_job_brings_no_other_file(name: str, app: Path) -> None:
    (app / name).parent.mkdir(exist_ok=True)
    (app / name).write_text("{}")
    assert refused(app)


def test_a_job_brings_no_links(app: Path, tmp_path: Path) -> None:
    path = app / "config" / SITE
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    assert refused(app)


def test_a_job_without_its_settings_is_refused(app: Path) -> None:
    (app / "config" / SERVER).unlink()
    assert refused(app)


# -- NVFlare's own check ------------------------------------------------------------------------------------------


class Place:
    """As much of a workspace as NVFlare's authorizer looks at."""

    def __init__(self, resources: Path) -> None:
        self.resources = resources

    def get_resources_file_path(self) -> str:
        return str(self.resources)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (EXECUTOR, True),
        ("panorgan.deployment.kits._write", False),
        ("panorgan.deployment.folders.Kit", False),
        ("panorgan.deployment.site_job.SiteJobEvil", False),
        ("panorgan.deployment.site_job.SiteMachine", False),
        (CONTROLLER, False),
        ("panorgan.federation.transports.nvflare.storage.KitStorage", False),
        ("subprocess.Popen", False),
    ],
)
def test_nvflare_builds_one_class_at_a_site(path: str, allowed: bool, tmp_path: Path) -> None:
    resources = tmp_path / "resources.json"
    resources.write_text(site_policies()["resources.json"])
    check = ComponentPathAuthorizer().authorize_component_config
    if allowed:
        check({"path": path}, workspace=Place(resources))
    else:
        with pytest.raises(UnsafeComponentError):
            check({"path": path}, workspace=Place(resources))


def test_the_allowed_names_are_classes_that_take_no_arguments() -> None:
    """So that a job cannot tell them anything: what they do stands in the kit."""
    from panorgan.deployment.coordinator_job import CoordinatorJob
    from panorgan.deployment.site_job import SiteJob

    for (name,), found in ((SITE_CLASSES, SiteJob), (SERVER_CLASSES, CoordinatorJob)):
        assert name == f"{found.__module__}.{found.__qualname__}"
        found()
        with pytest.raises(TypeError):
            found(anything=1)


def test_storage_stays_in_the_kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = tmp_path / "kit"
    kit.mkdir()
    monkeypatch.chdir(kit)
    KitStorage("storage/jobs")
    assert (kit / "storage" / "jobs").is_dir()
    for outside in (tmp_path / "outside", "../outside", "storage/../../outside"):
        with pytest.raises(ValueError, match="inside its own folder"):
            KitStorage(str(outside))
    assert not (tmp_path / "outside").exists()


# -- what a server may ask of a site -------------------------------------------------------------------------------


def test_a_site_answers_what_a_run_needs_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFlare would print files of the kit and delete its folders for a server that forgets to ask for permission."""
    known = list(ClientRequestProcessors.request_processors)
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", known)
    site_process.answer_only_what_a_run_needs()
    answered = {topic for processor in known for topic in processor.get_topics()}
    assert {TrainingTopic.DEPLOY, TrainingTopic.START_JOB, TrainingTopic.ABORT, TrainingTopic.CHECK_STATUS} <= answered
    refused = {
        SysCommandTopic.SHELL,
        SysCommandTopic.SYS_INFO,
        SysCommandTopic.REPORT_ENV,
        SysCommandTopic.CONFIGURE_SITE_LOG,
        TrainingTopic.DELETE_RUN,
        TrainingTopic.CONFIGURE_JOB_LOG,
        TrainingTopic.SHUTDOWN,
        TrainingTopic.RESTART,
    }
    assert not refused & answered


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    for name in ("startup", "local"):
        (tmp_path / "kit" / name).mkdir(parents=True)
    (tmp_path / "kit" / "local" / "egress.yaml").write_text("weights: true")
    return Workspace(str(tmp_path / "kit"), "north")


@pytest.mark.parametrize(
    "name", ["local", "startup", ".", "a b", "-x", "LOCAL", "c378caac-7028-4c54-96a6-bd76037b19d8/.."]
)
def test_a_job_cannot_be_called_like_a_folder_of_the_kit(name: str, workspace: Workspace) -> None:
    """NVFlare empties the folder of that name."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("config/x.json", "{}")
    error = SiteDeployer().deploy(workspace, name, {}, "app", packed.getvalue(), FLContext())
    assert error == "this is not the name of a job"
    assert (Path(workspace.get_root_dir()) / "local" / "egress.yaml").read_text() == "weights: true"


class Context:
    """As much of NVFlare's context as a launcher looks at."""

    def __init__(self, workspace: Workspace) -> None:
        module = {JobProcessArgs.EXE_MODULE: ("-m", "nvflare.private.fed.app.client.worker_process")}
        self.get_prop = {FLContextKey.WORKSPACE_OBJECT: workspace, FLContextKey.JOB_PROCESS_ARGS: module}.get


def test_a_jobs_process_has_neither_the_kit_nor_the_job_on_its_path(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(launcher, "spawn_process", lambda argv, env: started.append((argv, env)) or "a process")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    launched = launcher.SiteProcessLauncher()
    job = str(uuid.uuid4())
    launched.launch_job({"job_id": job}, Context(workspace))
    ((argv, environment),) = started
    assert argv[1:4] == ["-P", "-m", "nvflare.private.fed.app.client.worker_process"]
    assert "PYTHONPATH" not in environment
    with pytest.raises(ValueError, match="not the name of a job"):
        launched.launch_job({"job_id": "local"}, Context(workspace))
    assert len(started) == 1


# -- what a kit says about the connection --------------------------------------------------------------------------


PLAIN: dict[str, Any] = {
    "format_version": 2,
    "require_signed_jobs": True,
    "servers": [{"name": "pilot", "service": {"target": "host:1", "scheme": "grpc"}, "identity": "host"}],
    "client": {
        "ssl_private_key": "client.key",
        "ssl_cert": "client.crt",
        "ssl_root_cert": "rootCA.pem",
        "fqsn": "north",
        "is_leaf": True,
        "connection_security": "mtls",
    },
}


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"components": [{"id": "x", "path": "os.system"}]}, False),
        ({"app_validator": {"path": "x.Y"}}, False),
        ({"require_signed_jobs": False}, False),
        ({"client": {**PLAIN["client"], "connection_security": "clear"}}, False),
        ({"client": {**PLAIN["client"], "fqsn": {"path": "x.Y"}}}, False),
        ({"servers": [*PLAIN["servers"], *PLAIN["servers"]]}, False),
        ({"servers": []}, False),
    ],
)
def test_a_kit_may_say_where_to_connect_and_nothing_else(changes: dict[str, Any], plain: bool) -> None:
    assert is_plain_connection({**PLAIN, **changes}) is plain
    assert not is_plain_connection(None)
