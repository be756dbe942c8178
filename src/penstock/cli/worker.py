# SPDX-License-Identifier: Apache-2.0
"""`penstock worker`: run the jobs of a fleet."""

import socket
import threading
from functools import partial
from pathlib import Path
from typing import Annotated

import structlog
import typer

import penstock
from penstock.cli.shared.child import child_command
from penstock.cli.shared.fleet_store import store_url_of
from penstock.cli.shared.options import Coordination, MemberConfig
from penstock.cli.shared.signals import STOP_SECONDS_MAX, stopped_by_signals

# The time that jobs have to stop. The rest of the shutdown time is for releasing their leases.
_JOBS_STOP_SECONDS_MAX = STOP_SECONDS_MAX - 2.0

_log = structlog.get_logger(__name__)


def run(
    config: MemberConfig = None,
    coordination: Coordination = None,
    name: Annotated[str | None, typer.Option(help="This worker's name. Default: the host's name.")] = None,
    zone: Annotated[str, typer.Option(help="Where this worker runs.")] = "",
    weight: Annotated[float, typer.Option(min=0.001, help="How much it runs relative to the others.")] = 1.0,
    folder: Annotated[Path, typer.Option(help="Where the files and the output of jobs are.")] = Path(
        "penstock-jobs"
    ),
    metrics: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve /metrics of this worker and of its jobs here."),
    ] = None,
    session: Annotated[
        float, typer.Option(min=1.0, help="Seconds that it may be silent before others run its jobs.")
    ] = 10.0,
) -> None:
    """Run this worker's share of the fleet's jobs, each as a process, until SIGTERM.

    A job that fails is started again, after a pause that grows with each failure. Jobs move to other workers
    when this one ends, is lost or is drained.
    """
    from penstock.coordinate.store import open_store
    from penstock.fleet.group import JOB_WORKERS
    from penstock.fleet.job_tenure import ADDRESS_FILE, JobTenure
    from penstock.fleet.member import FleetMember, Membership
    from penstock.telemetry.job_address import ADDRESS_FILE_VARIABLE
    from penstock.telemetry.jobs import read_jobs
    from penstock.telemetry.publish import publish_metrics

    url = store_url_of(config, coordination)
    membership = Membership(
        name or socket.gethostname(), "", penstock.__version__, zone, weight, session, works=None
    )
    address_variable = None if metrics is None else ADDRESS_FILE_VARIABLE
    worker = FleetMember(
        partial(open_store, url),
        JOB_WORKERS,
        membership,
        lambda store, job, lease: JobTenure(
            store, job, lease, folder.absolute(), child_command(), address_variable
        ),
        end_seconds=_JOBS_STOP_SECONDS_MAX,
    )
    stopping = threading.Event()
    read = partial(read_jobs, folder=folder.absolute(), file_name=ADDRESS_FILE)
    with publish_metrics(read, address=metrics), stopped_by_signals(stopping.set):
        worker.start(failed=stopping.set)
        _log.info("working", worker=worker.name, folder=str(folder))
        stopping.wait()
        # A job that is still running after this time ends when this process ends.
        worker.stop()
    if worker.failure is not None:
        raise worker.failure
