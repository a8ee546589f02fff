"""A hospital's report: its own test cases with pictures, and what has left, from the folders of its kit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from browser import blocked, visit
from devtools import chromium

from panorgan.config import Experiment
from panorgan.deployment.folders import SiteKit
from panorgan.federation.audit import AuditLog
from panorgan.report.egress_summary import summarise_egress
from panorgan.report.site_page import is_scored, write_site_report
from panorgan.workflows.execute import train
from panorgan.workflows.run import Run
from panorgan.workflows.site_cases import cache_folder, site_settings


@pytest.fixture(scope="module")
def trained(tiny: Callable[..., Experiment], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny(training={"rounds": 1}), tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture
def kit(tiny: Callable[..., Experiment], tmp_path: Path) -> SiteKit:
    """North's kit as it is while the first run goes on: it has answered one round."""
    experiment = tiny()
    kit = SiteKit(tmp_path / "north")
    kit.local.mkdir(parents=True)
    data = site_settings(experiment, cache_folder(), lambda what, done, total: None)["north"]
    content = {
        "federation": "pilot",
        "name": "north",
        "server": "localhost:8002",
        "experiment_fingerprint": experiment.agreement().fingerprint(),
        "data": data.model_copy(update={"withheld": None}).as_json(),
        "hardware": {"device": "cpu", "threads": 1, "workers": 1},
    }
    kit.settings.write_text(yaml.safe_dump(content))
    kit.experiment.write_text(yaml.safe_dump(experiment.agreement().as_json()))
    log = AuditLog(kit.audit_log)
    log.append(_entry("join", numbers={"train_cases": 3.0, "annotated/liver": 3.0}, bytes=300))
    log.append(_entry("train", 1, numbers={"cases": 3.0, "loss": 2.5}, bytes=1000, tensors=4), [["a", [2], "float32"]])
    log.append(_entry("evaluate", 1, numbers={"cases": 1.0, "dice/liver": 0.25}, bytes=200))
    return kit


def _entry(task: str, round_: int = 0, **facts: object) -> dict[str, object]:
    usual = {"direction": "out", "kind": "sent", "task": task, "stage": "train" if round_ else "", "round": round_}
    return {**usual, "run": "r", "tensors": 0, "sha256": f"{task}{round_}", **facts}


def deliver(kit: SiteKit, trained: Run) -> None:
    shutil.copytree(trained.model_folder, kit.model, dirs_exist_ok=True)


def test_what_left_is_summed_up(kit: SiteKit) -> None:
    log = AuditLog(kit.audit_log)
    log.append(_entry("train", 2, numbers={"loss": 9.0}, bytes=1000, tensors=4, kind="refused", reasons=["too large"]))
    log.append(_entry("evaluate", 7, numbers={}, bytes=0, kind="refused", direction="in", reasons=["not due"]))
    egress, rounds = summarise_egress(kit.audit_log, {"train": 2})
    assert (egress.messages, egress.bytes, egress.models_scored, egress.runs) == (3, 1500, 1, 1)
    assert [(kind.task, kind.messages, kind.tensors) for kind in egress.kinds] == [
        ("join", 1, 0), ("train", 1, 4), ("evaluate", 1, 0)
    ]  # fmt: skip
    assert [len(egress.refused), len(egress.declined)] == [1, 1]
    assert "too large" in egress.refused[0]
    # Two rounds of another stage came before; what was refused has not left.
    (round_,) = rounds
    assert (round_.number, round_.losses, round_.validation) == (
        3, {"this site": 2.5}, {"this site": {"liver": 0.25}}
    )  # fmt: skip


def test_a_site_without_a_model_has_a_page_too(kit: SiteKit) -> None:
    page = write_site_report(kit).read_text()
    assert "loss" in page
    assert "<image" not in page
    assert not (kit.scores / "metrics.csv").exists()


def test_a_broken_log_is_said(kit: SiteKit) -> None:
    content = kit.audit_log.read_text()
    kit.audit_log.write_text(content.replace('"loss":2.5', '"loss":2.6'))
    assert "does not verify" in write_site_report(kit).read_text()


@pytest.mark.slow
def test_the_delivered_model_is_scored_and_shown(kit: SiteKit, trained: Run, tmp_path: Path) -> None:
    deliver(kit, trained)
    done: list[tuple[int, int]] = []
    path = write_site_report(kit, lambda *progress: done.append(progress))
    page = path.read_text()
    rows = [row for row in Run(kit.scores).scores if row["organ"] == "liver"]
    assert (path, done[-1]) == (kit.scores / "report.html", (len(rows), len(rows)))
    for row in rows:
        assert row["case"] in page
        assert f"{row['dice']:.3f}" in page
    assert page.count("<image") == min(len(rows), 3)
    dom, log = visit(page, tmp_path)
    assert "</html>" in dom
    assert blocked(log) == []
    with chromium(tmp_path / "telephone") as browser:
        shown = browser.open(path.as_uri(), width=400)
        shown.wait_for("document.querySelector('footer')")
        assert shown.value("document.documentElement.scrollWidth <= window.innerWidth")

    assert is_scored(kit)
    write_site_report(kit, lambda *progress: pytest.fail("the scores are those of this model"))
    later = os.stat(kit.scores / "metrics.csv").st_mtime + 10
    os.utime(kit.model / "model.json", (later, later))
    assert not is_scored(kit), "another model has arrived since"


@pytest.mark.slow
def test_scans_that_have_gone_leave_the_rest_of_the_page(kit: SiteKit, trained: Run, capsys) -> None:
    from panorgan.cli.report import write_and_say

    deliver(kit, trained)
    write_site_report(kit)
    content = yaml.safe_load(kit.settings.read_text())
    content["data"]["folder"] = str(kit.path / "gone")
    kit.settings.write_text(yaml.safe_dump(content))
    write_and_say(kit.path, as_json=True)
    page = Path(json.loads(capsys.readouterr().out)["report"]).read_text()
    assert "<image" not in page
    assert "cannot be shown" in page
