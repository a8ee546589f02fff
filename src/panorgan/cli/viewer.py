"""`panorgan view`: scans, labels and predictions in the browser of this machine."""

from __future__ import annotations

import json
import webbrowser
from dataclasses import dataclass
from pathlib import Path

from panorgan.cli.console import Console, say
from panorgan.cli.watch import has_screen
from panorgan.viewer.open_study import open_study
from panorgan.viewer.session import Session


@dataclass(frozen=True)
class ViewRequest:
    """The options of the command line. `seconds` None: until Ctrl-C."""

    path: Path
    case: str = ""
    organ: str = ""
    scan: Path | None = None
    layout: str = "auto"
    port: int = 0
    browser: bool = True
    seconds: float | None = None
    as_json: bool = False


def view(request: ViewRequest) -> None:
    """Serve the viewer until it is stopped."""
    study = open_study(request.path, request.scan, request.layout)
    with Session(study, request.case, request.organ, request.port) as session:
        if request.as_json:
            say(json.dumps({"url": session.url, "kind": study.kind, "cases": len(study.cases)}))
        else:
            cases = f"{len(study.cases)} case{'s' if len(study.cases) != 1 else ''}"
            Console(soft_wrap=True, highlight=False).print(f"{study.title}: {cases}\n{session.url}", markup=False)
            say("Only browsers on this machine can open it. Ctrl-C stops the viewer.")
        if request.browser and has_screen():
            webbrowser.open(session.url)
        try:
            session.server.wait(request.seconds)
        except KeyboardInterrupt:
            say("Stopped.")
