"""The files in a kit: settings that read back as they were written, and texts for people."""

from __future__ import annotations

import configparser
import platform
import re
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from kit_making import EXPERIMENT, federation
from refusing import refused

pytest.importorskip("nvflare", reason="the network extra is not installed")

from cryptography import x509

from panorgan.config import load_agreement
from panorgan.deployment.control import Control
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.deployment.kit_files import load_coordinator_file, load_federation, load_site_file
from panorgan.deployment.kit_texts import experiment_text
from panorgan.deployment.kits import KitsReport, make_kits
from panorgan.deployment.segment import _listeners, _setup
from panorgan.errors import ConfigError
from panorgan.federation.egress import number_words
from panorgan.federation.limits import LimitSettings
from panorgan.workflows.run import Run

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def test_everybody_has_the_same_experiment(made: KitsReport) -> None:
    files = [ServerKit(made.server).experiment, *(SiteKit(path).experiment for path in made.sites.values())]
    assert len({path.read_bytes() for path in files}) == 1
    assert load_agreement(files[0]) == EXPERIMENT
    assert load_agreement(files[0]).fingerprint() == EXPERIMENT.fingerprint()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_experiment_survives_being_written(example: Path, tmp_path: Path) -> None:
    experiment = load_agreement(example)
    path = tmp_path / "experiment.yaml"
    path.write_text(experiment_text("pilot", experiment))
    assert load_agreement(path) == experiment


def test_the_coordinator_file_says_what_the_federation_file_said(made: KitsReport) -> None:
    read = load_coordinator_file(ServerKit(made.server))
    settings = federation()
    assert (read.federation, read.coordinator, read.host, read.port) == (
        "pilot",
        "ada@example.org",
        "federation.example.org",
        8443,
    )
    assert read.rounds == settings.rounds
    assert read.heartbeat_seconds == 33
    assert {name: site.organization for name, site in read.sites.items()} == {"north": "north", "east-2": "east_2"}
    assert read.experiment_fingerprint == EXPERIMENT.fingerprint()
    assert read.run == made.server.resolve() / "run"


def test_mlflow_is_for_the_operator_to_choose(copy: Path) -> None:
    """A folder in the kit, or anywhere; without it the run has one listener less."""
    kit = ServerKit(copy / "server")
    settings = load_coordinator_file(kit)
    assert settings.mlflow is None
    content = yaml.safe_load(kit.settings.read_text())
    kit.settings.write_text(yaml.safe_dump({**content, "mlflow": "mlruns"}))
    assert load_coordinator_file(kit).mlflow == kit.path.resolve() / "mlruns"
    assert len(_listeners(Run(kit.run(settings)), Control(kit.control(settings)), settings)) == 2


def test_names_that_look_like_something_else_stay_names(tmp_path: Path) -> None:
    settings = federation(name="007", sites=["no", "1e5"])
    report = make_kits(settings, EXPERIMENT, tmp_path / "out")
    assert load_coordinator_file(ServerKit(report.server)).federation == "007"
    kit = SiteKit(report.sites["1e5"])
    kit.settings.write_text(kit.settings.read_text().replace("<the folder with your scans and labels>", "scans"))
    assert load_site_file(kit).name == "1e5"


def test_a_site_file_must_be_filled_in(copy: Path) -> None:
    kit = SiteKit(copy / "sites" / "north")
    with refused("data-folder-blank", ConfigError) as caught:
        load_site_file(kit)
    assert all(f"{kit.settings}" in text and "data.folder" in text for text in (caught.value.where, caught.value.fix))
    text = kit.settings.read_text()
    kit.settings.write_text(text.replace('"<the folder with your scans and labels>"', ""))
    with refused("data-folder-blank", ConfigError):
        load_site_file(kit)
    kit.settings.write_text(text.replace('"<the folder with your scans and labels>"', "../scans"))
    read = load_site_file(kit)
    assert read.data.folder == (copy / "sites" / "scans").resolve()
    assert read.cache == (kit.path / "cache").resolve()
    assert read.state == (kit.path / "state").resolve()
    assert read.server == "federation.example.org:8443"
    assert read.experiment_fingerprint == EXPERIMENT.fingerprint()
    assert read.versions["nvflare"]


def test_the_federation_file_names_the_experiment_beside_it(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text(experiment_text("pilot", EXPERIMENT))
    (tmp_path / "federation.yaml").write_text("experiment: experiment.yaml\nserver: {host: localhost}\nsites: [a]\n")
    settings, agreement = load_federation(tmp_path / "federation.yaml")
    assert settings.experiment == (tmp_path / "experiment.yaml").resolve()
    assert agreement == EXPERIMENT.model_copy(update={"limits": LimitSettings(largest_share=0.5)})


def test_the_federations_limits_are_agreed_on_by_everybody(tmp_path: Path) -> None:
    """Those of the federation stand in every kit in the place of the experiment's; a changed limit is another one."""
    own = EXPERIMENT.model_copy(update={"limits": LimitSettings(most_cases_per_site=7, largest_share=0.9)})
    (tmp_path / "experiment.yaml").write_text(experiment_text("pilot", own))
    text = "experiment: experiment.yaml\nserver: {host: localhost}\nsites: [a]\n"
    (tmp_path / "federation.yaml").write_text(text + "limits: {most_cases_per_site: 300, hu: [-200, 500]}\n")
    settings, agreement = load_federation(tmp_path / "federation.yaml")
    assert agreement.limits == LimitSettings(most_cases_per_site=300, largest_share=0.5, hu=(-200, 500))
    assert agreement.fingerprint() != own.fingerprint()
    kits = make_kits(settings, agreement, tmp_path / "out")
    for kit in (kits.server, kits.sites["a"]):
        there = yaml.safe_load((kit / "local" / "experiment.yaml").read_text())["limits"]
        assert (there["most_cases_per_site"], there["largest_share"], there["hu"]) == (300, 0.5, [-200, 500])
    server = ServerKit(kits.server)
    setup = _setup(server, load_agreement(server.experiment), load_coordinator_file(server), "run")
    assert setup.limits == agreement.limits


@pytest.mark.parametrize(("sites", "enough"), [("[a, b, c, d]", False), ("[a, b, c, d, e]", True)])
def test_a_robust_aggregation_needs_five_hospitals(sites: str, enough: bool, tmp_path: Path) -> None:
    training = EXPERIMENT.training.model_copy(update={"aggregation": "median"})
    own = EXPERIMENT.model_copy(update={"training": training})
    (tmp_path / "experiment.yaml").write_text(experiment_text("pilot", own))
    text = f"experiment: experiment.yaml\nserver: {{host: localhost}}\nsites: {sites}\n"
    (tmp_path / "federation.yaml").write_text(text)
    with nullcontext() if enough else refused("too-few-for-robust", ConfigError):
        load_federation(tmp_path / "federation.yaml")


# -- texts -----------------------------------------------------------------------------------------------------


def test_the_readme_tells_it_what_to_open_what_leaves_and_when_the_certificate_ends(made: KitsReport) -> None:
    text = (made.sites["north"] / "README.md").read_text()
    certificate = x509.load_pem_x509_certificate((made.sites["north"] / "startup" / "client.crt").read_bytes())
    assert "federation.example.org, TCP 8443" in text
    assert certificate.not_valid_after_utc.date().isoformat() in text
    assert "ada@example.org" in text
    for name, words in number_words("fedavg").items():
        assert f"Numbers named `{name}`: {words}." in " ".join(text.split())
    for command in ("approve", "preflight", "site", "egress"):
        assert f"panorgan federation {command} ." in text


def test_a_site_publishes_no_port_and_the_server_one(made: KitsReport) -> None:
    own = yaml.safe_load((made.sites["north"] / "compose.yaml").read_text())["services"]
    site = own["site"]
    assert [name for name in own if "ports" in own[name]] == []
    # What runs may write to the kit, but not to what the hospital approved; `approve` may.
    assert [volume.partition(":")[0] for volume in site["volumes"] if not volume.endswith(":ro")] == ["."]
    assert {"./local:/kit/local:ro", "./startup:/kit/startup:ro"} <= set(site["volumes"])
    assert own["approve"]["volumes"] == [".:/kit"]
    services = yaml.safe_load((made.server / "compose.yaml").read_text())["services"]
    assert services["server"]["ports"] == ["8443:8443"]
    assert services["server"]["networks"]["default"]["aliases"] == ["federation.example.org"]
    assert services["coordinator"]["ports"] == []
    # The image is built from a folder without keys.
    assert [path.name for path in (made.server / site["build"]).iterdir()] == ["Dockerfile"]


def test_the_image_has_a_base_of_an_exact_version(made: KitsReport) -> None:
    for kit in (made.server, made.sites["north"]):
        lines = (kit / "image" / "Dockerfile").read_text().splitlines()
        bases = [line.removeprefix("ARG BASE=") for line in lines if line.startswith("ARG BASE=")]
        assert bases == [f"python:{platform.python_version()}-slim-bookworm"]
        assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-[a-z]+", bases[0]), "no tag that moves with every release"
        assert [line for line in lines if line.startswith("FROM")] == ["FROM ${BASE}"]
        assert any(".RepoDigests 0" in line for line in lines), "how to pin the digest"


def test_units_run_as_nobody_special_and_come_back(made: KitsReport) -> None:
    units = [*made.server.glob("*.service"), *made.sites["north"].glob("*.service")]
    assert len(units) == 3
    for path in units:
        unit = configparser.ConfigParser(interpolation=None)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read(path)
        service = unit["Service"]
        assert service["User"] not in ("", "root")
        assert service["Restart"] == ("on-failure" if "coordinator" in path.name else "always")
        assert service["NoNewPrivileges"] == "yes"
        assert service["ReadWritePaths"] == service["WorkingDirectory"]
        assert service["Environment"].endswith(" PYTHONSAFEPATH=1")
        if "site" in path.name:
            home = service["WorkingDirectory"]
            assert service["ReadOnlyPaths"] == f"{home}/local {home}/startup"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_units(made: KitsReport) -> None:
    units = [*made.server.glob("*.service"), *made.sites["north"].glob("*.service")]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "panorgan" in line]) == (0, [])
