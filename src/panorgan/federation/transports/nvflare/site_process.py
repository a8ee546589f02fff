"""A site's engine: NVFlare's client, cut down to what a run needs. Started with `python -P -m`.

NVFlare's client also lists and prints files of the kit, deletes folders by name, restarts and tells about the machine,
and asks for permission only if the server says that it should. The server belongs to somebody else.
"""

from __future__ import annotations

import sys

from nvflare.fuel.f3.mpm import MainProcessMonitor
from nvflare.private.fed.app.client import client_train
from nvflare.private.fed.client import scheduler_cmds, training_cmds
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

ANSWERED = (
    training_cmds.DeployProcessor,
    training_cmds.AbortAppProcessor,
    training_cmds.ClientStatusProcessor,
    training_cmds.NotifyJobStatusProcessor,
    scheduler_cmds.CheckResourceProcessor,
    scheduler_cmds.CancelResourceProcessor,
    scheduler_cmds.StartJobProcessor,
    scheduler_cmds.ReportVersionProcessor,
)
"""Take a job, start it, end it, say how it does and which version runs. Everything else is no request here."""


def answer_only_what_a_run_needs() -> None:
    """For this process; NVFlare registers what is in its list when it connects."""
    ClientRequestProcessors.request_processors[:] = [
        processor for processor in ClientRequestProcessors.request_processors if isinstance(processor, ANSWERED)
    ]


def main() -> int:
    """As NVFlare's own `client_train` begins."""
    answer_only_what_a_run_needs()
    arguments = client_train.parse_arguments()
    return int(MainProcessMonitor.run(main_func=client_train.main, run_dir=arguments.workspace, args=arguments))


if __name__ == "__main__":
    sys.exit(main())
