# SPDX-License-Identifier: Apache-2.0
"""The listeners of one process, created from the settings: what they serve, and the stores that they use."""

from collections.abc import Callable, Mapping
from functools import partial

from penstock.coordinate.session_guard import SessionGuard
from penstock.coordinate.store import SESSION_SECONDS, CoordinationStore, open_store
from penstock.model import TablePatterns
from penstock.serve.canal.cluster import CanalCluster
from penstock.serve.coordination import CoordinationProbe
from penstock.serve.durable import DurableInstance
from penstock.serve.limited import Limits
from penstock.serve.ports import Ports
from penstock.serve.served import Arrivals, Served, ServedInstance
from penstock.settings.daemon import Settings, split_host_port

# How long a scrape or a probe waits for the coordination store.
_PROBE_SECONDS = 2.0


def make_served(
    settings: Settings,
    instances: Mapping[str, ServedInstance],
    arrivals: Arrivals,
    is_here: Callable[[str], bool],
) -> Served:
    """Return the served instances according to the settings; see `Served`."""
    served = Served({}, arrivals, is_here=is_here)
    configure_served(served, settings, instances)
    return served


def configure_served(served: Served, settings: Settings, instances: Mapping[str, ServedInstance]) -> None:
    """From now on, serve instances according to the settings."""
    by_name = settings.instances.items()
    served.configure(
        instances,
        {name: instance.shard_columns for name, instance in by_name},
        [name for name, instance in by_name if instance.canal_gtid],
        {name: settings.log_of(name).retention.hold_age for name in settings.instances},
        {
            name: TablePatterns(list(instance.tables), list(instance.exclude_tables))
            for name, instance in by_name
            if instance.canal_filters
        },
        {
            name: Limits.of_settings(name, instance.canal_where, instance.canal_columns)
            for name, instance in by_name
        },
    )


def as_served(
    settings: Settings, instances: Mapping[str, ServedInstance], arrivals: Arrivals
) -> dict[str, ServedInstance]:
    """Return instances in the form that their readers see."""
    logs = {name: settings.log_of(name) for name in instances}
    return {
        name: instance
        if logs[name].serve == "written"
        else DurableInstance(instance, logs[name].copies, arrivals.arrived)
        for name, instance in instances.items()
    }


def store_opener(settings: Settings) -> Callable[[], CoordinationStore] | None:
    """Return a function that opens the store of the Canal clients' cursors; None without a Canal listener.

    A store in a file is checked at once. A ZooKeeper ensemble may be unavailable for a while; capture then
    runs without it. Raises OptionInvalid, DiskFailed.
    """
    if settings.listen.canal is None:
        return None
    if settings.coordination is None:
        settings.log.folder.mkdir(parents=True, exist_ok=True)
    url = settings.coordination_url()
    if url.startswith("sqlite:"):
        open_store(url).close()
    return partial(open_store, url)


def open_cursors(settings: Settings) -> CoordinationStore:
    """Open the store of the Canal clients' cursors, which the daemon has checked."""
    return open_store(settings.coordination_url())


def coordination_probe(settings: Settings) -> CoordinationProbe | None:
    """Return the probe of the coordination store; None if neither the settings nor a listener need one."""
    if settings.coordination is None and settings.listen.canal is None:
        return None
    url = settings.coordination_url()
    open_probe = partial(open_store, url, _PROBE_SECONDS)
    return CoordinationProbe(url, open_probe, settings.instances)


def canal_cluster(
    settings: Settings,
    ports: Ports,
    is_here: Callable[[str], bool],
    guard: SessionGuard,
) -> CanalCluster | None:
    """Return the object that shows this daemon to Canal's cluster clients; None if the settings name no
    ensemble.
    """
    listen = settings.listen
    if listen.canal_cluster is None:
        return None
    return CanalCluster(
        partial(open_store, listen.canal_cluster),
        listen.canal_client_address(split_host_port(ports.address("canal"))[1]),
        settings.instances,
        is_here,
        SESSION_SECONDS if settings.fleet is None else settings.fleet.session,
        joined=partial(guard.note, "canal", listen.canal_cluster),
    )
