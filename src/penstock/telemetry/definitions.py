# SPDX-License-Identifier: Apache-2.0
"""Every metric: its name, type, labels, meaning and unit. `docs/reference/metrics.md` is generated from this.

Names follow Prometheus: base units, `_total` on counters. The number of values of each label is bounded. The
instance is in `penstock_instance`, because Prometheus sets `instance` to the address that it scrapes.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

# Latencies of a local disk and of a network, up to the longest timeouts.
SECONDS_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
# Lags: from an idle network to a replica that is a day behind.
LAG_BOUNDS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 21_600.0, 86_400.0)
# Batches of a pipeline: from milliseconds in one process to the largest ones on Spark.
BATCH_BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class Kind(StrEnum):
    """The type of a metric. An INFO metric is a constant 1 whose labels contain the information."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


# The kind of process that has a metric.
Origin = Literal["daemon", "pipeline", "subscriber", "holder", "any"]


@dataclass(frozen=True)
class Definition:
    """A metric. `bounds` are the bucket bounds of a histogram. A sample may omit `optional` labels."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    optional: frozenset[str] = frozenset()

    @property
    def unit(self) -> str:
        """The base unit, "" for a count."""
        name = self.name.removesuffix("_total")
        return next((unit for unit in ("seconds", "bytes") if name.endswith(f"_{unit}")), "")


@dataclass(frozen=True)
class Group:
    """The metrics about one subject. `origin` is the kind of process that reports them."""

    title: str
    origin: Origin
    definitions: tuple[Definition, ...]


def _counter(name: str, meaning: str, *labels: str, optional: str = "") -> Definition:
    return Definition(
        f"penstock_{name}_total", Kind.COUNTER, meaning, labels, (), frozenset(optional.split())
    )


def _gauge(name: str, meaning: str, *labels: str) -> Definition:
    return Definition(f"penstock_{name}", Kind.GAUGE, meaning, labels)


def _histogram(
    name: str, meaning: str, *labels: str, bounds: tuple[float, ...] = SECONDS_BOUNDS
) -> Definition:
    return Definition(f"penstock_{name}", Kind.HISTOGRAM, meaning, labels, bounds)


_CAPTURE = (
    _gauge(
        "capture_state",
        "1 for the state of the instance's capture, 0 for the others",
        "penstock_instance",
        "state",
    ),
    _gauge("capture_lag_seconds", "How far the log may be behind its server", "penstock_instance"),
    _gauge(
        "capture_lag_bytes", "Bytes of the server's log that are still to be received", "penstock_instance"
    ),
    _histogram(
        "capture_event_lag_seconds",
        "Age of the last commit of each received piece of the log when it was stored",
        "penstock_instance",
        bounds=LAG_BOUNDS,
    ),
    _gauge(
        "capture_last_event_timestamp_seconds",
        "Commit time of the last received transaction",
        "penstock_instance",
    ),
    _gauge("capture_last_heard_timestamp_seconds", "Time of the server's last packet", "penstock_instance"),
    _counter("capture_received_bytes", "Bytes appended to the log", "penstock_instance"),
    _counter("capture_transactions", "Complete transactions received", "penstock_instance"),
    _counter("capture_large_transactions", "Received transactions of more than 64 MiB", "penstock_instance"),
    _counter(
        "capture_events", "Events received, by type as in SHOW BINLOG EVENTS", "penstock_instance", "type"
    ),
    _counter(
        "capture_rows",
        "Row changes received; an update counts once. With metrics.tables also by table",
        "penstock_instance",
        "operation",
        "table",
        optional="table",
    ),
    _counter(
        "capture_statements",
        "Statements that may define tables: applied to the definitions, ignored because they change none, or"
        " failed and retried",
        "penstock_instance",
        "outcome",
    ),
    _counter("capture_connects", "Streams opened on a server", "penstock_instance"),
    _counter(
        "capture_disconnects", "Streams that ended, by the class of the error", "penstock_instance", "reason"
    ),
    _counter(
        "capture_failovers", "Streams opened on another server than the one before", "penstock_instance"
    ),
    _counter(
        "capture_process_exits",
        "Ends of the process that captures the instance, by signal, exit status, or silence",
        "penstock_instance",
        "reason",
    ),
    _counter(
        "listener_process_exits",
        "Ends of listener processes, by signal, exit status, or silence",
        "reason",
    ),
    _counter("capture_errors", "Failed attempts, by the class of the error", "penstock_instance", "type"),
    _counter(
        "capture_checksum_failures",
        "Streams that ended at an event with a wrong checksum",
        "penstock_instance",
    ),
    _gauge("capture_epoch", "The epoch of the log", "penstock_instance"),
    _gauge("capture_tables_in_doubt", "Tables whose definition is not settled", "penstock_instance"),
    _gauge(
        "capture_binlog_file",
        "Number of the source file at the end of the received transactions",
        "penstock_instance",
    ),
    _gauge("capture_binlog_position", "Offset in that file", "penstock_instance"),
    _histogram(
        "semisync_ack_seconds",
        "Time from the receipt of a commit to its acknowledgement, with semi_sync",
        "penstock_instance",
    ),
)

_SERVER = (
    _gauge("server_binlog_file", "Number of the newest binlog file of the server", "penstock_instance"),
    _gauge("server_binlog_position", "Size of that file", "penstock_instance"),
    _gauge("server_binlog_bytes", "Size of all binlog files that the server keeps", "penstock_instance"),
    _gauge(
        "server_kept_bytes_before_capture",
        "Bytes that the server keeps before the end of the log: at 0 the next bytes are about to be purged",
        "penstock_instance",
    ),
    _gauge(
        "server_earliest_timestamp_seconds",
        "Creation time of the oldest binlog file of the server",
        "penstock_instance",
    ),
    _gauge(
        "server_retention_seconds",
        "How long the server keeps binlog files; 0: without limit",
        "penstock_instance",
    ),
)

_LOG = (
    _gauge(
        "log_bytes",
        "Size of the segments: on this disk, compressed, or in the tier",
        "penstock_instance",
        "tier",
    ),
    _gauge("log_segments", "Number of segments", "penstock_instance", "tier"),
    _gauge(
        "log_earliest_timestamp_seconds",
        "Commit time of the first transaction in the log",
        "penstock_instance",
    ),
    _gauge(
        "log_durable_binlog_file",
        "Number of the source file at the end of the durable transactions",
        "penstock_instance",
    ),
    _gauge("log_durable_binlog_position", "Offset in that file", "penstock_instance"),
    _gauge("log_holds", "Holds in force", "penstock_instance"),
    _gauge(
        "log_hold_bytes",
        "Bytes after a hold, for the holds that keep the most",
        "penstock_instance",
        "reader",
    ),
    _gauge("log_holds_broken", "Holds that a limit has broken", "penstock_instance"),
    _gauge("log_disk_free_bytes", "Free bytes on the disk of the log", "penstock_instance"),
    _gauge("log_disk_reserved_bytes", "Free bytes below which capture pauses", "penstock_instance"),
    _histogram("log_fsync_seconds", "Duration of each sync of the log", "penstock_instance"),
    _counter("log_tier_uploads", "Segments moved to the tier, and failures", "penstock_instance", "outcome"),
    _gauge("memory_buffer_bytes", "Bytes in the memory tier", "penstock_instance"),
    _gauge("memory_buffer_limit_bytes", "Maximum bytes of the memory tier", "penstock_instance"),
)

_READER = ("penstock_instance", "protocol", "subscription", "shard")
_SERVING = (
    _gauge("reader_lag_seconds", "Age of the last commit sent to a reader that is not at the end", *_READER),
    _gauge("reader_lag_bytes", "Bytes of the log after the position of a reader", *_READER),
    _counter("reader_sent_bytes", "Bytes sent to a reader", *_READER),
    _counter("reader_sent_rows", "Rows sent to a reader", *_READER),
    _gauge("listener_sessions", "Open connections", "protocol"),
    _counter("listener_requests", "HTTP requests answered, by status", "protocol", "code"),
    _histogram("listener_request_seconds", "Time to the first byte of each HTTP response", "protocol"),
    _counter("listener_rejected", "Connections and requests refused or cut off", "protocol", "reason"),
    _gauge("listener_certificate_expires_timestamp_seconds", "When the listeners' certificate file expires"),
)

_SUBSCRIPTION = ("penstock_instance", "subscription")
_COORDINATION = (
    _gauge("subscription_members", "Members of a subscription", *_SUBSCRIPTION),
    _gauge("subscription_shards", "Shards of a subscription", *_SUBSCRIPTION),
    _gauge("subscription_shards_unowned", "Shards that no member holds", *_SUBSCRIPTION),
    _counter("subscription_rebalances", "Assignments of shards to members", *_SUBSCRIPTION),
    _gauge("coordination_up", "1 if the coordination store answers", "store"),
    _counter("coordination_errors", "Failed requests to the coordination store", "store"),
    _histogram("coordination_request_seconds", "Duration of requests to the coordination store", "store"),
    _gauge(
        "settings_state",
        "1 for what became of the newest settings: applied, refused, or failed by a defect; until a restart"
        " part of failed settings may be in effect",
        "state",
    ),
)

_PROCESS = (
    Definition(
        "penstock_build_info",
        Kind.INFO,
        "The version that runs, and the commit, if it was installed from a repository",
        ("version", "python", "revision"),
        (),
        frozenset({"revision"}),
    ),
    Definition("process_cpu_seconds_total", Kind.COUNTER, "Processor time of the process"),
    Definition("process_start_time_seconds", Kind.GAUGE, "Start of the process, since 1970"),
    Definition("process_resident_memory_bytes", Kind.GAUGE, "Resident memory"),
    Definition("process_virtual_memory_bytes", Kind.GAUGE, "Virtual memory"),
    Definition("process_open_fds", Kind.GAUGE, "Open file descriptors"),
    Definition("process_max_fds", Kind.GAUGE, "Maximum of open file descriptors"),
    Definition("python_gc_collections_total", Kind.COUNTER, "Runs of the garbage collector", ("generation",)),
)

_PUMP = (
    _gauge(
        "pump_state", "1 for the state of the instance's Pump, 0 for the others", "penstock_instance", "state"
    ),
    _counter("pump_stored", "Binlogs of TiDB servers that were stored durably", "penstock_instance"),
    _counter("pump_stored_bytes", "Bytes of those binlogs", "penstock_instance"),
    _counter(
        "pump_refused",
        "Binlogs that were not acknowledged, by reason, such as a full disk or a commit without prewrite",
        "penstock_instance",
        "reason",
    ),
    _counter("pump_released", "Transactions and fakes released to Drainers", "penstock_instance"),
    _gauge(
        "pump_released_timestamp_seconds",
        "Commit time up to which everything was released to Drainers",
        "penstock_instance",
    ),
    _gauge("pump_open_transactions", "Prewrites whose outcome is not known yet", "penstock_instance"),
    _gauge(
        "pump_stalled_seconds",
        "For how long a transaction without an outcome has held everything after it back; 0 if none does",
        "penstock_instance",
    ),
)

_SINK = ("pipeline", "sink", "shard")
_PIPELINE = (
    _gauge(
        "pipeline_state",
        "1 for the state of the pipeline's run into a sink, 0 for the others",
        *_SINK,
        "state",
    ),
    _gauge(
        "pipeline_last_report_timestamp_seconds",
        "Time of the run's last report: of a batch, of one that lasts, or of an error",
        *_SINK,
    ),
    _gauge(
        "pipeline_lag_seconds",
        "How far the target is behind; 0 if the last batch ended at the end of the logs and none lasts",
        *_SINK,
    ),
    _gauge("pipeline_position_timestamp_seconds", "Commit time of the last change in the target", *_SINK),
    _gauge(
        "pipeline_binlog_file",
        "Number of the source file up to which every change is in the target",
        *_SINK,
        "source",
    ),
    _gauge("pipeline_binlog_position", "Offset in that file", *_SINK, "source"),
    _gauge(
        "pipeline_source_aside",
        "1 if the run continues without a source that fails, and retries it later",
        *_SINK,
        "source",
    ),
    _gauge("pipeline_tables", "Tables that are loading, loaded, or stopped by an error", *_SINK, "state"),
    _counter("pipeline_batches", "Batches that are complete in the target", *_SINK),
    _gauge(
        "pipeline_batch_running_seconds",
        "For how long the batch in progress has been running, from ten seconds on; 0 before and between",
        *_SINK,
    ),
    _histogram(
        "pipeline_batch_seconds",
        "Duration of each batch by phase: read, steps and write in its tasks, the sink's commit, and the"
        " record of its position. Tasks run at the same time as each other, so the duration of the tasks is"
        " divided in proportion to the time that they spent in each phase",
        *_SINK,
        "phase",
        bounds=BATCH_BOUNDS,
    ),
    _counter(
        "pipeline_rows",
        "Rows by stage: read from the log, loaded from tables, removed by steps (filtered), rejected by a"
        " step (dead), written to the sink, and left out there because the target has newer ones (outdated)."
        " An update counts once. The operation is insert, update, delete or load; filtered and outdated rows"
        " have none, because steps and sinks convert operations",
        *_SINK,
        "stage",
        "operation",
        optional="operation",
    ),
    _counter("pipeline_read_bytes", "Bytes of the decoded rows", *_SINK),
    _counter("pipeline_dead_letters", "Rows that a step rejected into the dead letters", *_SINK),
    _counter("pipeline_unrepresentable", "Values that the target's types cannot hold", *_SINK),
    _counter("pipeline_retries", "Retries after an error, by its class", *_SINK, "type"),
    _counter("pipeline_failures", "Runs that ended with an error, by its class", *_SINK, "type"),
    _gauge("pipeline_last_error_timestamp_seconds", "Time of the last error", *_SINK),
    _gauge("load_chunks", "Chunks of the tables that are loading: done and remaining", *_SINK, "state"),
    _gauge(
        "pipeline_dead_letters",
        "Entries of the dead letters that were neither replayed nor purged, counted once a minute; the shards"
        " of a sink share them",
        "pipeline",
        "sink",
    ),
    _counter(
        "schema_changes",
        "Changes of the columns of a sink's tables by outcome: applied, ignored as `schema_changes` wants, or"
        " refused by these settings or by the sink",
        *_SINK,
        "outcome",
    ),
    _gauge("load_started_timestamp_seconds", "When this run began to load tables", *_SINK),
    _gauge("load_remaining_seconds", "When the load will have ended, at its rate so far", *_SINK),
)

_COMPARED = ("pipeline", "sink")
_VERIFY = (
    _gauge(
        "verify_last_success_timestamp_seconds",
        "Time of the last comparison of the whole target that found no difference; 0 if there was none",
        *_COMPARED,
    ),
    _gauge("verify_last_timestamp_seconds", "Time of the last comparison of the whole target", *_COMPARED),
    _gauge(
        "verify_differences", "Rows that the last comparison found different and did not repair", *_COMPARED
    ),
    _gauge("verify_rows", "Rows of the source in the last comparison", *_COMPARED),
)

_LEASES = (
    _gauge(
        "lease_held",
        "1 if the process holds the lease of its work, as far as it knows: of the capture of an instance in a"
        " fleet, or of a pipeline, its sink or its shard",
        "store",
        "kind",
        "work",
    ),
)

_MEMBER = ("subscription", "member")
_SUBSCRIBER = (
    _gauge("subscriber_connected", "1 if the member has a daemon or a server to read from", *_MEMBER),
    _gauge("subscriber_shards", "Shards that the member holds", *_MEMBER),
    _gauge("subscriber_lag_bytes", "Bytes of the log after the part that was received", *_MEMBER),
    _gauge(
        "subscriber_lag_seconds",
        "Age of the last consumed transaction of the shard that is furthest behind; 0 if nothing is left",
        *_MEMBER,
    ),
    _counter("subscriber_skipped_batches", "Batches passed over after the callback failed", *_MEMBER),
)

GROUPS = (
    Group("Capture", "daemon", _CAPTURE),
    Group("Server", "daemon", _SERVER),
    Group("Log", "daemon", _LOG),
    Group("Pumps of TiDB", "daemon", _PUMP),
    Group("Readers and listeners", "daemon", _SERVING),
    Group("Coordination", "daemon", _COORDINATION),
    Group("Pipelines", "pipeline", _PIPELINE),
    Group("Comparisons of pipelines", "daemon", _VERIFY),
    Group("Leases", "holder", _LEASES),
    Group("Subscribers", "subscriber", _SUBSCRIBER),
    Group("Process", "any", _PROCESS),
)

DEFINITIONS = {definition.name: definition for group in GROUPS for definition in group.definitions}
