# SPDX-License-Identifier: Apache-2.0
"""Checks a daemon's settings against the environment: reachable servers, and disk space."""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing

from penstock.errors import OptionInvalid, PenstockError
from penstock.model import ServerAddress
from penstock.mysql.connection import connect
from penstock.settings.daemon import InstanceSettings, Settings
from penstock.settings.ticdc import is_ticdc_kafka
from penstock.settings.tidb import pd_addresses
from penstock.ticdc.kafka_reader import open_reader
from penstock.ticdc.storage import open_storage, read_checkpoint


def check_surroundings(settings: Settings) -> list[str]:
    """Connect to every server and examine the disk of every log; change nothing.

    Returns warnings about problems that do not prevent the daemon from working, for example that one server
    of a cluster does not answer. Raises OptionInvalid with all problems.
    """
    problems: list[str] = []
    remarks: list[str] = []
    for name, instance in settings.instances.items():
        addresses = instance.addresses()
        refused = [problem for address in addresses if (problem := _problem_of(address)) is not None]
        if instance.is_tidb and (no_cluster := _problem_of_cluster(instance)) is not None:
            problems.append(f"instances.{name}: {no_cluster.message}")
        if instance.is_ticdc and (unreadable := _problem_of_sink(instance)) is not None:
            problems.append(f"instances.{name}: {unreadable.message}")
        messages = [f"instances.{name}: {problem.message}" for problem in refused]
        if len(refused) < len(addresses):
            remarks += messages
        else:
            problems += messages
        problems += [
            f"instances.{name}: {disk_problem}" for disk_problem in _problems_of_disk(settings, name)
        ]
    if problems:
        raise OptionInvalid(
            "\n  ".join(["the daemon could not work:", *problems, *remarks]),
            hint="penstock check mysql://user@host:3306 prints the privileges that an account is missing",
        )
    return remarks


def _problem_of(address: ServerAddress) -> PenstockError | None:
    """Return why a server cannot be used, None if it answers and has a binary log."""
    try:
        with connect(address) as connection:
            connection.head()
    except PenstockError as problem:
        return problem
    return None


def _problem_of_cluster(instance: InstanceSettings) -> PenstockError | None:
    """Return why a TiDB cluster cannot be used, None if its PD responds."""
    # Imported here because only a TiDB cluster needs gRPC.
    from penstock.tidb.cluster import Cluster
    from penstock.tidb.drainer import cluster_tls

    try:
        with closing(Cluster(pd_addresses(instance.source), cluster_tls(instance.tidb))) as cluster:
            cluster.timestamp()
    except PenstockError as problem:
        return problem
    return None


def _problem_of_sink(instance: InstanceSettings) -> PenstockError | None:
    """Return why the output of TiCDC cannot be read, None if it contains a checkpoint or topics."""
    try:
        if is_ticdc_kafka(instance.source):
            with closing(open_reader(instance.source, instance.ticdc)) as reader:
                reader.partitions()
            return None
        read_checkpoint(open_storage(instance.source))
    except PenstockError as problem:
        return problem
    return None


def _problems_of_disk(settings: Settings, name: str) -> Iterator[str]:
    log = settings.log_of(name)
    if log.mode == "memory":
        return
    folder = log.folder.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield f"the folder {existing} cannot be written by this account"
    free = shutil.disk_usage(existing).free
    if free < log.free_bytes_min:
        requirement = f"log.free_bytes_min is {log.free_bytes_min}"
        yield f"{free} bytes are free below {existing}, and {requirement}"
