"""A site's process: NVFlare's client, cut down to what a run needs. Started with `python -P -m`.

NVFlare's client also lists and prints files of the kit, deletes folders by name, restarts, reports about the machine,
and asks for permission only if the server says that it should. Another institution runs that server.

NVFlare's own `startup/sub_start.sh` ends its `PYTHONPATH` in a colon. To Python that is the working folder, the kit,
also with `PYTHONSAFEPATH`; so panorgan does not use it.
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
"""Eight kinds of requests: take a job, start it, end it, report its state and the version. There are no others here."""


def answer_only_what_a_run_needs() -> None:
    """For this process; NVFlare registers the processors in its list when it connects."""
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
