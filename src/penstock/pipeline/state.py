# SPDX-License-Identifier: Apache-2.0
"""The durable state of a pipeline in the coordination store: its progress, current batch and runner.

    /pipelines/NAME/lease      the current runner; ends with the runner's session
                   /standing   `Checkpoint`: the batches that are done, and the offsets reached
                   /batch      `BatchRecord`: the batch begun last
                   /tables     the definitions that targets were prepared for
                   /loads      the chunks of full loads and resnapshots
                   /requests   requested resnapshots and their outcome
                   /reset      the offsets before a reset, kept until the next run
                   /pause      exists while the pipeline is paused
                   /progress   the status that the runner publishes
                   /verified   what the last comparison found: see `verification_record`
                   /sinks/SINK the same records, except `pause`, for each sink of a pipeline with `sinks`
                   /shards/1-of-4 the same for each shard of a pipeline with `shards`: see `shard_records`

A batch is recorded before it runs. After the sink has committed it, a single write of the checkpoint marks it
done. A runner that dies at any moment therefore leaves either a batch to run again or a batch that is done.
`penstock.engine.recording` says which batches need no record.

Any process can call `request_resnapshot`, whether or not the pipeline runs. Before its next batch, the runner
cuts the table into chunks and mixes them into the following batches as `ChunkWork` with the request's number.
When the last chunk is done, it updates the request.
"""

import json
import os
import socket
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import structlog

from penstock.changes import Target
from penstock.coordinate.lease import Holder, Lease
from penstock.coordinate.store import (
    ABSENT,
    CoordinationStore,
    Session,
    decoded_name,
    open_store,
    path_of,
    reading_record,
)
from penstock.errors import CoordinationLost, LeaseLost, OptionInvalid, PositionInvalid, VersionConflict
from penstock.model import TableName
from penstock.pipeline.record import BatchRecord
from penstock.pipeline.resnapshot import HINT_STATE, Resnapshot
from penstock.pipeline.resnapshot_requests import ResnapshotRequests
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.shard_records import ShardRecords
from penstock.pipeline.shards import Shard

_TOP = "pipelines"
_SINKS = "sinks"
_SHARDS = "shards"
# How long the lease of a dead runner blocks other processes.
_LEASE_SECONDS = 10.0
# The records that belong to the whole pipeline, not to a sink or shard.
_OF_PIPELINE = ("lease", "pause", _SINKS, _SHARDS)
_OUTLIVES_RESET = (*_OF_PIPELINE, "reset")

_log = structlog.get_logger(__name__)


def table_key(source: str, table: TableName) -> str:
    """Return a table's key in the state: `source/database.table`."""
    return f"{source}/{table}"


def split_key(key: str) -> tuple[str, TableName]:
    """Return the source and the table of a key. Source names have no slash."""
    source, _, table = key.partition("/")
    return source, TableName.parse(table)


@dataclass(frozen=True)
class TableLoad:
    """The progress of a full load or a resnapshot of one table, in chunks. `rows` is an estimate.

    `pages` is the name of the record that lists its chunks. `where`, `remove` and `request` are copied from
    the resnapshot request; `request` is "" for a full load. Changes with a commit version before `floor` are
    already contained in the load. No row read so far contains a change at or after version `read_to`. In a
    history, the first chunk ends the row versions that began before `ends_before`. `begins_again` means that
    the chunks are in an outdated key order, so the load must restart.
    """

    chunks: int
    done: int = 0
    rows: int = 0
    pages: str = ""
    where: str | None = None
    remove: bool = False
    request: str = ""
    floor: int = 0
    read_to: int = 0
    ends_before: int = 0
    begins_again: bool = False

    @property
    def finished(self) -> bool:
        """Whether every chunk is done."""
        return self.done >= self.chunks and not self.begins_again


def _log_position(offset: Mapping[str, Any]) -> tuple[Any, ...]:
    return offset.get("epoch", 0), offset["file"], offset["offset"]


@dataclass(frozen=True)
class Checkpoint:
    """The recorded progress: every batch up to `number`, and every change before `offsets`, by source.

    A reset changes `generation`. `token` is the fencing token of the runner. `loads` contains, by table key,
    the loads that are running or finished. `stopped` contains, by table, the reasons why the pipeline
    continues without certain tables. `planned` is true once every table of the full load is in `loads`.
    `skips` contains, by source, the ranges of the log to skip in ascending order, each as its begin and end
    offsets. `earlier` contains, by source, the offsets that an earlier generation reached, because the target
    may contain rows of that generation. It is None if there was no earlier generation.
    """

    generation: str
    number: int = 0
    offsets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    loads: Mapping[str, TableLoad] = field(default_factory=dict)
    stopped: Mapping[str, str] = field(default_factory=dict)
    planned: bool = False
    token: int = 0
    skips: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]] = field(default_factory=dict)
    earlier: Mapping[str, Mapping[str, Any]] | None = None

    @classmethod
    def new(cls, earlier: Mapping[str, Mapping[str, Any]] | None = None) -> Self:
        """Return the progress of a new pipeline."""
        return cls(uuid.uuid4().hex[:12], earlier=earlier)

    @property
    def loading(self) -> bool:
        """Whether any table that has not been stopped is not completely loaded yet."""
        loads = (load for key, load in self.loads.items() if key not in self.stopped)
        return not self.planned or not all(load.finished for load in loads)

    @property
    def stands(self) -> dict[str, Mapping[str, Any]]:
        """The offsets. An offset at the beginning of a skipped range is moved to the end of the range."""
        offsets = dict(self.offsets)
        for source, skips in self.skips.items():
            for begin, end in skips:
                if source in offsets and _log_position(begin) == _log_position(offsets[source]):
                    offsets[source] = end
        return offsets

    def after(self, record: BatchRecord) -> Self:
        """Return the progress after a batch."""
        loads = dict(self.loads)
        for key, done in record.loads.items():
            loads[key] = replace(loads[key], done=done)
        return replace(self, number=record.number, offsets={**self.offsets, **record.end}, loads=loads)

    def with_read_versions(self, versions: Mapping[str, int]) -> Self:
        """Return the progress after tables were read. `versions` maps each table key to the log's end at the
        time of the read.
        """
        read = [(key, self.loads[key], version) for key, version in versions.items()]
        loads = {key: replace(load, read_to=max(load.read_to, version)) for key, load, version in read}
        return replace(self, loads={**self.loads, **loads})

    def encode(self) -> bytes:
        """Return the record's value."""
        value = {**vars(self), "loads": {key: vars(load) for key, load in self.loads.items()}}
        return zlib.compress(json.dumps(value).encode(), 1)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Read what `encode` wrote. Raises SchemaInvalid for a record of another version of Penstock."""
        with reading_record("the state of a pipeline", HINT_STATE):
            fields = json.loads(zlib.decompress(value))
            fields["loads"] = {key: TableLoad(**load) for key, load in fields["loads"].items()}
            return cls(**fields)


class PipelineState(ResnapshotRequests):
    """The state of a pipeline, or of one of its sinks or shards.

    The process that runs it holds the lease. Other processes may read the state, request resnapshots and
    pause the pipeline. Methods raise CoordinationLost if the store does not answer. Writes raise LeaseLost if
    another process has taken over.
    """

    def __init__(
        self, store: CoordinationStore, name: str, sink: str = "", shard: Shard | None = None
    ) -> None:
        whole = path_of(_TOP, name, *((_SINKS, sink) if sink else ()))
        super().__init__(store, whole if shard is None else whole + path_of(_SHARDS, str(shard)))
        self.name = name
        self.sink = sink
        self.shard = shard
        self.shards = ShardRecords(store, whole + path_of(_SHARDS))
        # All sinks and shards pause together.
        self._pause = path_of(_TOP, name, "pause")
        self._version = ABSENT
        self._batch_version: int | None = ABSENT
        self._session: Session | None = None
        self._lease: Lease | None = None
        # Whether another process is known to have taken over.
        self.lost = False

    @classmethod
    def open(cls, url: str, name: str, sink: str = "") -> Self:
        """Open the store that a URL names. Raises OptionInvalid, CoordinationLost."""
        return cls(open_store(url), name, sink)

    @classmethod
    def of(cls, settings: PipelineSettings) -> Self:
        """Open the state of one sink and shard. Raises OptionInvalid, CoordinationLost."""
        return cls(open_store(settings.state), settings.name, settings.sink.name, settings.shard)

    @classmethod
    def names(cls, store: CoordinationStore) -> list[str]:
        """Return the pipelines that a store knows, sorted."""
        return sorted(decoded_name(name) for name in store.list(path_of(_TOP)))

    @property
    def shown_name(self) -> str:
        """The pipeline's name, followed by the names of its sink and shard, if any."""
        return f"{self.name}/{self.part}" if self.part else self.name

    @property
    def part(self) -> str:
        """The names of the sink and the shard, "" if the pipeline has one of each."""
        return "/".join(map(str, filter(None, (self.sink, self.shard))))

    def parts(self) -> list[Self]:
        """Return the states that record progress: one for each sink and shard, or this state if there is one
        of each.
        """
        sinks = [type(self)(self.store, self.name, sink) for sink in self.sinks()] or [self]
        return [shard for sink in sinks for shard in sink.shard_states()]

    def sinks(self) -> list[str]:
        """Return the sinks of the pipeline that have a separate state, sorted."""
        return sorted(decoded_name(name) for name in self.store.list(path_of(_TOP, self.name, _SINKS)))

    def close(self) -> None:
        """Release the lease and close the store."""
        self.release()
        self.store.close()

    def release(self) -> None:
        """Release the lease, if this process has it."""
        if self._lease is not None and not self._lease.lost:
            try:
                self._lease.release()
            except CoordinationLost as problem:
                _log.warning("a lease is left to expire", pipeline=self.name, why=str(problem))
        if self._session is not None:
            self._session.close()
        self._lease = self._session = None

    # --- The runner -------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Whether this process holds the pipeline, as far as it knows."""
        return self._lease is not None and not self._lease.lost and not self.lost

    @property
    def lease_seconds(self) -> float:
        """How long the lease of a dead runner blocks other processes."""
        return _LEASE_SECONDS if self._session is None else self._session.seconds

    def take(self, token_before: int | None = None) -> Checkpoint:
        """Acquire the lease and return the progress.

        `token_before` is the token of this process's last lease. Raises LeaseLost if another process runs the
        pipeline, or ran or reset it since that lease, and OptionInvalid if the progress was recorded with
        `sink` and the pipeline has `sinks` now, or vice versa, or with another number of shards.
        """
        self._refuse_other_sinks()
        lease = self.hold()
        self._refuse_other_shards()
        record = self.store.get(self._at("standing"))
        if record is None:
            # Finish a reset that was interrupted.
            self._clear()
        checkpoint = Checkpoint.decode(record.value) if record is not None else self._new_checkpoint()
        if token_before not in (None, checkpoint.token):
            lease.release()
            raise self._taken_over()
        self._version = ABSENT if record is None else record.version
        batch = self.store.get(self._at("batch"))
        self._batch_version = ABSENT if batch is None else batch.version
        # After this write the previous holder can no longer write.
        written = self.write(replace(checkpoint, token=lease.token))
        self.drop_large("reset")
        return written

    def hold(self) -> Lease:
        """Acquire the lease and nothing else. Raises LeaseLost if another process has it."""
        if self._session is None or not self._session.alive:
            self._session = self.store.session(_LEASE_SECONDS)
        holder = f"{socket.gethostname()}:{os.getpid()}"
        self._lease = Lease.acquire(self.store, self._session, self._at("lease"), holder)
        if self._lease is None:
            other = self.runner()
            raise LeaseLost(
                f"the pipeline {self.shown_name} is run by {other.name if other else 'another process'}",
                hint=f"penstock pipelines show {self.name}; a runner that died releases it after"
                f" {_LEASE_SECONDS:.0f} seconds",
            )
        return self._lease

    def _refuse_other_sinks(self) -> None:
        if self.sink and self.store.get(path_of(_TOP, self.name, "standing")) is not None:
            raise OptionInvalid(
                f"the progress of the pipeline {self.name} was recorded with `sink`, and it has `sinks` now",
                hint=f"penstock pipelines adopt FILE --sink {self.sink} gives the progress to this sink;"
                " penstock pipelines reset FILE --yes forgets it",
            )
        if self.sink:
            return
        # Check the checkpoints: a sink that was reset still has a state but no checkpoint.
        paths = {sink: path_of(_TOP, self.name, _SINKS, sink, "standing") for sink in self.sinks()}
        if sinks := [sink for sink, path in paths.items() if self.store.get(path) is not None]:
            raise OptionInvalid(
                f"the progress of the pipeline {self.name} is recorded for the sinks {', '.join(sinks)},"
                " and it has `sink` now",
                hint="Write the sink under `sinks` with its name; penstock pipelines reset FILE --yes forgets"
                " the progress of all sinks",
            )

    def _refuse_other_shards(self) -> None:
        own = 1 if self.shard is None else self.shard.count
        if (recorded := self.shards.count()) != own:
            raise OptionInvalid(
                f"the pipeline {self.name} has progress of {recorded} shards, not of {own}",
                hint="penstock run --local FILE hands it over to the shards that the file names",
            )

    def _new_checkpoint(self) -> Checkpoint:
        return Checkpoint.new(self.get_large("reset"))

    def runner(self) -> Holder | None:
        """Return the process that runs the pipeline, None if there is none."""
        return Holder.of(self.store.get(self._at("lease")))

    # --- Progress ---------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint | None:
        """Return the progress, None if the pipeline never ran. Any process may call it."""
        record = self.store.get(self._at("standing"))
        return None if record is None else Checkpoint.decode(record.value)

    def write(self, checkpoint: Checkpoint) -> Checkpoint:
        """Write the progress, as the runner. Raises LeaseLost."""
        if self._lease is None or self._lease.lost:
            raise self._no_longer_held()
        try:
            self._version = self.store.put(self._at("standing"), checkpoint.encode(), self._version)
        except VersionConflict as problem:
            raise self._taken_over() from problem
        return checkpoint

    def confirm(self) -> None:
        """Check, as the runner, that this process still owns the pipeline. Raises LeaseLost.

        A new runner writes the checkpoint before it does anything else. If the checkpoint is unchanged, no
        other process had taken over when this method read it. A runner that is suspended right after this
        check, until its lease has expired, can still perform one write. A sink that stores batch numbers
        recognises that batch. Other sinks get the rows of one batch again, possibly after those of the next
        batch.
        """
        record = self.store.get(self._at("standing"), latest=True)
        if self._lease is None or self._lease.lost:
            raise self._no_longer_held()
        if record is None or record.version != self._version:
            raise self._taken_over()

    def _no_longer_held(self) -> LeaseLost:
        self.lost = True
        return LeaseLost(f"the pipeline {self.shown_name} is no longer held by this process")

    def _taken_over(self) -> LeaseLost:
        self.lost = True
        return LeaseLost(f"another process has taken the pipeline {self.shown_name} over, or it was reset")

    def begin(self, record: BatchRecord) -> None:
        """Record a batch before it runs. Raises LeaseLost."""
        try:
            self._batch_version = self.put_large("batch", record.to_json(), self._batch_version)
        except VersionConflict as problem:
            raise self._taken_over() from problem

    def begun(self, checkpoint: Checkpoint) -> BatchRecord | None:
        """Return the batch that was begun but is not done, None if there is none."""
        value = self.get_large("batch")
        # The record of the last batch, which is done, may have thousands of chunks. It is not decoded.
        if value is None or value.get("number") != checkpoint.number + 1:
            return None
        return BatchRecord.from_json(value)

    def skip(self, source: str, begin: Mapping[str, Any], end: Mapping[str, Any]) -> None:
        """Skip a range of a source's log.

        An unfinished batch that may contain the range is abandoned, and its number is not used again.
        Acquires the lease: raises LeaseLost while the pipeline runs.
        """
        checkpoint = self.take()
        begun = self.begun(checkpoint)
        number = checkpoint.number if begun is None else begun.number
        known = [*checkpoint.skips.get(source, ()), [dict(begin), dict(end)]]
        self.write(replace(checkpoint, number=number, skips={**checkpoint.skips, source: known}))

    def rewind(
        self,
        source: str,
        offset: Mapping[str, Any],
        seen: Checkpoint,
        keyless: Callable[[TableName], None] | None = None,
    ) -> None:
        """Read a source's log again from an earlier offset, which was determined from progress `seen`.

        Replayed statements request their tables again, so earlier requests are deleted and table definitions
        lose their log position. Tables without a key are read again, because replaying would duplicate their
        rows. `keyless` is called with each such table before anything is written; with None, duplicates are
        accepted. Acquires the lease: raises LeaseLost while the pipeline runs, PositionInvalid if it ran
        since `seen`.
        """
        checkpoint = self.take()
        if (checkpoint.generation, checkpoint.offsets) != (seen.generation, seen.offsets):
            raise PositionInvalid(
                f"the pipeline {self.name} went on while its earlier place was looked for",
                hint=f"penstock pipelines pause {self.name}, then go back again",
            )
        known = self.get_large("tables") or {"tables": {}, "targets": []}
        of_source = {key: table for key, table in known["tables"].items() if split_key(key)[0] == source}
        reread = [
            split_key(key)[1]
            for key, table in sorted(of_source.items())
            if keyless is not None and not table["gone"] and not Target.from_json(table["current"]).row_key
        ]
        for name in reread:
            assert keyless is not None, "else none is read again"
            keyless(name)
        begun = self.begun(checkpoint)
        number = checkpoint.number if begun is None else begun.number
        self._forget_requests(source)
        for name in reread:
            self.request_resnapshot(source, name, remove=False, by_pipeline=True)
        for table in of_source.values():
            table["logged"] = table["keys"] = None
        self.put_large("tables", known)
        # A crash before this write leaves needless requests but loses nothing.
        self.write(replace(checkpoint, number=number, offsets={**checkpoint.offsets, source: dict(offset)}))

    def _forget_requests(self, source: str) -> None:
        """Delete a source's finished requests. Give new numbers to open requests that statements caused."""
        for request in self.requests():
            if request.source == source and (request.ended_us or request.is_of_statement):
                if not request.ended_us:
                    self.request_resnapshot(
                        source,
                        request.table,
                        request.where,
                        remove=request.remove,
                        by_pipeline=request.by_pipeline,
                    )
                self.store.delete(self._at("requests", request.number))

    # --- Resnapshots ------------------------------------------------------------------------

    def request_resnapshot(
        self,
        source: str,
        table: TableName,
        where: str | None = None,
        *,
        remove: bool = True,
        number: str | None = None,
        by_pipeline: bool = False,
        reuse: bool = False,
    ) -> str:
        """Ask the pipeline to read a table of a source again; return the request's number.

        The rows are read as they are at that time. With `remove`, rows that only the target has are deleted.
        `where`, a condition on the source's columns in the server's SQL, restricts both the read and the
        deletion. Only the pipeline's own requests pass a `number`, or set `by_pipeline` without a number.
        With `reuse`, a request that has not begun and reads the same rows is returned instead. Raises
        OptionInvalid if the pipeline never ran.
        """
        if self.checkpoint() is None:
            raise OptionInvalid(
                f"the pipeline {self.name} never ran", hint="penstock run pipeline.yaml loads its tables"
            )
        asked_us = time.time_ns() // 1000
        is_own = by_pipeline or number is not None
        request_id = number or f"{asked_us:x}-{uuid.uuid4().hex[:6]}"
        request = Resnapshot(request_id, source, table, where, remove, asked_us=asked_us, by_pipeline=is_own)
        if reuse and (waiting := self.find_waiting(request)) is not None:
            return waiting.number
        try:
            self.store.put(self._at("requests", request_id), request.encode(), ABSENT)
        except VersionConflict:
            if number is None:
                raise
        return request_id

    # --- Handing over -----------------------------------------------------------------------

    def shard_states(self) -> list[Self]:
        """Return the states that record progress: one for each shard, or only this state if there is one
        shard.
        """
        count = self.shards.count()
        if count == 1 or self.shard is not None:
            return [self]
        return [type(self)(self.store, self.name, self.sink, shard) for shard in Shard.all_of(count)]

    def write_first(self, checkpoint: Checkpoint) -> None:
        """Write the progress of a state whose lease no process may acquire yet."""
        self.store.put(self._at("standing"), checkpoint.encode())

    def copy_to(self, other: Self) -> None:
        """Copy every record of this progress, and the checkpoint last. A copy without a checkpoint is
        incomplete.
        """
        for name in sorted(self._own_names(), key=lambda name: name == "standing"):
            self._copy_below(self._at(name), other._at(name))

    def forget(self) -> None:
        """Delete every record of this progress, the checkpoint first."""
        for name in sorted(self._own_names(), key=lambda name: name != "standing"):
            self._delete_below(self._at(name))

    def _own_names(self) -> list[str]:
        return [name for name in map(decoded_name, self.store.list(self._path)) if name not in _OF_PIPELINE]

    # --- Pause, progress, reset -------------------------------------------------------------

    def pause(self, why: str = "") -> None:
        """Pause the pipeline. A running pipeline stops after its current batch."""
        value = {"why": why, "since_us": time.time_ns() // 1000}
        self.store.put(self._pause, json.dumps(value).encode())

    def resume(self) -> None:
        """Allow the pipeline to run again."""
        self.store.delete(self._pause)

    @property
    def paused(self) -> bool:
        """Whether the pipeline is paused."""
        return self.store.get(self._pause) is not None

    def pause_message(self) -> str | None:
        """Return a message that the pipeline is paused and why, None if it is not."""
        record = self.store.get(self._pause)
        if record is None:
            return None
        with reading_record("the pause of a pipeline", HINT_STATE):
            why = str(json.loads(record.value)["why"])
        return f"the pipeline {self.name} is paused" + (f": {why}" if why else "")

    def show(self, progress: Mapping[str, Any]) -> None:
        """Write the status that the runner publishes, as plain JSON values."""
        self.store.put(self._at("progress"), zlib.compress(json.dumps(dict(progress)).encode(), 1))

    def shown(self) -> dict[str, Any]:
        """Return the status that a runner published last, {} if there is none."""
        record = self.store.get(self._at("progress"))
        with reading_record("what a pipeline shows of itself", HINT_STATE):
            return {} if record is None else dict(json.loads(zlib.decompress(record.value)))

    def reset(self) -> None:
        """Forget everything except the offsets, the names of targets and the pause.

        The next run starts over under another generation. It uses the target names to remove what the sources
        no longer have. If a reset is interrupted, the next process that acquires the lease finishes it.

        Raises LeaseLost while the pipeline runs.
        """
        self.refuse_while_run()
        checkpoint = self.checkpoint()
        if checkpoint is not None:
            # A source that has not started since the last reset keeps its offset from before that reset.
            self.put_large("reset", {**(checkpoint.earlier or {}), **checkpoint.offsets})
            self.store.delete(self._at("standing"))
        self._clear()

    def refuse_while_run(self) -> None:
        """Raise LeaseLost if a process runs the pipeline."""
        if (runner := self.runner()) is not None:
            raise LeaseLost(
                f"the pipeline {self.shown_name} is run by {runner.name}",
                hint=f"penstock pipelines pause {self.name}, and wait until it has stopped",
            )

    def _clear(self) -> None:
        """Delete everything that belongs to a deleted checkpoint, except the names of targets."""
        known = self.get_large("tables") or {"targets": []}
        written = set(known.get("written", ()))
        written |= {str(Target.from_json(target).name) for target in known["targets"]}
        if written:
            self.put_large("tables", {"tables": {}, "targets": [], "written": sorted(written)})
        kept = (*_OUTLIVES_RESET, "tables") if written else _OUTLIVES_RESET
        for name in self.store.list(self._path):
            if decoded_name(name) not in kept:
                self._delete_below(f"{self._path}/{name}")
