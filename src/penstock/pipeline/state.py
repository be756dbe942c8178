# SPDX-License-Identifier: Apache-2.0
"""What a pipeline must not forget, in the coordination store: where it stands, what it has begun, who runs.

    /pipelines/NAME/lease      who runs it now; ends with the runner's session
                   /standing   `Standing`: the batches that are done, and up to where
                   /batch      `BatchRecord`: the batch that was begun last
                   /tables     the definitions that targets were prepared for
                   /loads      the chunks that full loads and resnapshots were cut into
                   /requests   resnapshots that were asked for, and what became of them
                   /reset      where it stood before it was reset, until its next run
                   /pause      stands while the pipeline is not to run
                   /progress   what the runner shows of itself

A batch is written down before it runs. Once the sink has committed it, one write of the standing makes it
done: so a runner that dies at any moment leaves either a batch to be run again, or one that is done.

A resnapshot is asked for with `request_resnapshot`, by anybody, whether the pipeline runs or not. The
runner takes it up before its next batch: it cuts the table into chunks, mixes them into the batches that
follow as `ChunkWork` with the request's number, and notes in the request when the last of them is done.
"""

import json
import os
import socket
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from penstock.limits import COORDINATION_RECORD_BYTES_MAX
from penstock.model import TableName
from penstock.pipeline.record import BatchRecord
from penstock.pipeline.resnapshot import HINT_STATE, Resnapshot

_TOP = "pipelines"
# Room for what a store adds to a record.
_PAGE_BYTES = COORDINATION_RECORD_BYTES_MAX - 4096
# How long a runner that is gone keeps others out.
_LEASE_SECONDS = 10.0
_ENDED_REQUESTS_KEPT = 100
_OUTLIVES_RESET = ("lease", "pause", "reset")

_log = structlog.get_logger(__name__)


def table_key(source: str, table: TableName) -> str:
    """Return how a table of a source is named in the state: `source/database.table`."""
    return f"{source}/{table}"


def split_key(key: str) -> tuple[str, TableName]:
    """Return the source and the table of a key. Sources' names have no slash."""
    source, _, table = key.partition("/")
    return source, TableName.parse(table)


@dataclass(frozen=True)
class TableLoad:
    """How far a full load or a resnapshot of one table has come, in chunks. `rows` were estimated before.

    `pages` names where its chunks are kept. `where` and `remove` are those of the request, `request` its
    number or "". `floor` is the commit version before which changes of the table are in the load already, and
    no row that was read is of a change from `read_to` on.
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

    @property
    def finished(self) -> bool:
        """Whether every chunk is done."""
        return self.done >= self.chunks


def _place(offset: Mapping[str, Any]) -> tuple[Any, ...]:
    return offset.get("epoch", 0), offset["file"], offset["offset"]


@dataclass(frozen=True)
class Standing:
    """What is done: every batch up to `number`, and every change before `offsets`, by source.

    `generation` is another one after a reset. `token` fences the runner. `loads` are the tables that are or
    were loaded, by key; `stopped` those that the pipeline goes on without, and why. `planned` tells that
    every table of the full load is in `loads`. `skips` are stretches of a source's log that are passed over,
    ascending: the offsets of their begin and end. `earlier` tells, by source, where an earlier generation
    stood whose rows the target may have; None where there was none.
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
        """Return where a pipeline begins."""
        return cls(uuid.uuid4().hex[:12], earlier=earlier)

    @property
    def loading(self) -> bool:
        """Whether a table is not loaded to its end, of those that the pipeline goes on with."""
        return not self.planned or any(
            not load.finished for key, load in self.loads.items() if key not in self.stopped
        )

    @property
    def stands(self) -> dict[str, Mapping[str, Any]]:
        """The offsets, each behind a stretch that is passed over where it stands in front of one."""
        found = dict(self.offsets)
        for source, skips in self.skips.items():
            for begin, end in skips:
                if source in found and _place(begin) == _place(found[source]):
                    found[source] = end
        return found

    def after(self, record: BatchRecord) -> Self:
        """Return what is done once a batch is."""
        loads = dict(self.loads)
        for key, done in record.loads.items():
            loads[key] = replace(loads[key], done=done)
        return replace(self, number=record.number, offsets={**self.offsets, **record.end}, loads=loads)

    def having_read(self, key: str, version: int) -> Self:
        """Return what is done, with the log of a table's source having ended at `version` after its read."""
        load = self.loads[key]
        noted = replace(load, read_to=max(load.read_to, version))
        return replace(self, loads={**self.loads, key: noted})

    def encode(self) -> bytes:
        """Return the record's value."""
        return zlib.compress(json.dumps(asdict(self)).encode(), 1)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Read what `encode` wrote. Raises SchemaInvalid for what another version of Penstock wrote."""
        with reading_record("the state of a pipeline", HINT_STATE):
            found = json.loads(zlib.decompress(value))
            found["loads"] = {key: TableLoad(**load) for key, load in found["loads"].items()}
            return cls(**found)


class PipelineState:
    """The state of one pipeline. One that runs it holds the lease; others read, ask and pause.

    Every method raises CoordinationLost where the store does not answer, and what the runner writes LeaseLost
    where somebody else has taken over.
    """

    def __init__(self, store: CoordinationStore, name: str) -> None:
        self.store = store
        self.name = name
        self._path = path_of(_TOP, name)
        self._version = ABSENT
        self._batch_version: int | None = ABSENT
        self._session: Session | None = None
        self._lease: Lease | None = None
        # Requests that have ended, by number: they change no more.
        self._ended: dict[str, Resnapshot] = {}
        # What was cleared of pages that nothing names.
        self._swept: set[str] = set()
        # Whether it is known that somebody else has taken over.
        self.lost = False

    @classmethod
    def open(cls, url: str, name: str) -> Self:
        """Open the store that a URL names. Raises OptionInvalid, CoordinationLost."""
        return cls(open_store(url), name)

    @classmethod
    def names(cls, store: CoordinationStore) -> list[str]:
        """Return the pipelines that a store knows, sorted."""
        return sorted(decoded_name(name) for name in store.list(path_of(_TOP)))

    def close(self) -> None:
        """Give the lease back and let go of the store."""
        if self._lease is not None and not self._lease.lost:
            try:
                self._lease.release()
            except CoordinationLost as problem:
                _log.warning("a lease is left to expire", pipeline=self.name, why=str(problem))
        if self._session is not None:
            self._session.close()
        self._lease = self._session = None
        self.store.close()

    # --- Who runs it ------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Whether this process has the pipeline, as far as it knows."""
        return self._lease is not None and not self._lease.lost and not self.lost

    @property
    def lease_seconds(self) -> float:
        """How long a runner that is gone keeps others out."""
        return _LEASE_SECONDS if self._session is None else self._session.seconds

    def take(self, token_before: int | None = None) -> Standing:
        """Take the lease, and return what is done. `token_before` is the token of this process's last lease.

        Raises LeaseLost where another runs the pipeline, ran it since that lease, or reset it.
        """
        if self._session is None or not self._session.alive:
            self._session = self.store.session(_LEASE_SECONDS)
        holder = f"{socket.gethostname()}:{os.getpid()}"
        self._lease = Lease.acquire(self.store, self._session, self._at("lease"), holder)
        if self._lease is None:
            other = self.runner()
            raise LeaseLost(
                f"the pipeline {self.name} is run by {other.name if other else 'another process'}",
                hint=f"penstock pipelines show {self.name}; a runner that died lets go after"
                f" {_LEASE_SECONDS:.0f} seconds",
            )
        record = self.store.get(self._at("standing"))
        if record is None:
            # Of a reset that did not come to its end.
            self._clear()
        standing = Standing.decode(record.value) if record is not None else self._new_standing()
        if token_before not in (None, standing.token):
            self._lease.release()
            raise self._taken_over()
        self._version = ABSENT if record is None else record.version
        batch = self.store.get(self._at("batch"))
        self._batch_version = ABSENT if batch is None else batch.version
        # Whoever held it before can write no more once this stands.
        written = self.write(replace(standing, token=self._lease.token))
        self.drop_large("reset")
        return written

    def _new_standing(self) -> Standing:
        return Standing.new(self.get_large("reset"))

    def runner(self) -> Holder | None:
        """Return who runs the pipeline now, None where nobody does."""
        return Holder.of(self.store.get(self._at("lease")))

    # --- What is done -----------------------------------------------------------------------

    def standing(self) -> Standing | None:
        """Return what is done, as anybody may read it; None of a pipeline that never ran."""
        record = self.store.get(self._at("standing"))
        return None if record is None else Standing.decode(record.value)

    def write(self, standing: Standing) -> Standing:
        """Write what is done, as the runner. Raises LeaseLost."""
        if self._lease is None or self._lease.lost:
            raise self._no_longer_held()
        try:
            self._version = self.store.put(self._at("standing"), standing.encode(), self._version)
        except VersionConflict as problem:
            raise self._taken_over() from problem
        return standing

    def confirm(self) -> None:
        """Look, as the runner, whether the pipeline is still its own. Raises LeaseLost.

        Whoever takes over writes the standing before anything else; so up to the moment of this read nobody
        had. A runner that stands still right behind it, until its lease has run out, does once what it was
        about to do: a sink that keeps the batch's number then finds it there, others get rows of one batch
        again, maybe behind those of the next.
        """
        record = self.store.get(self._at("standing"), latest=True)
        if self._lease is None or self._lease.lost:
            raise self._no_longer_held()
        if record is None or record.version != self._version:
            raise self._taken_over()

    def _no_longer_held(self) -> LeaseLost:
        self.lost = True
        return LeaseLost(f"the pipeline {self.name} is no longer held by this process")

    def _taken_over(self) -> LeaseLost:
        self.lost = True
        return LeaseLost(f"another process has taken the pipeline {self.name} over, or it was reset")

    def begin(self, record: BatchRecord) -> None:
        """Write a batch down before it runs. Raises LeaseLost."""
        try:
            self._batch_version = self.put_large("batch", record.to_json(), self._batch_version)
        except VersionConflict as problem:
            raise self._taken_over() from problem

    def begun(self, standing: Standing) -> BatchRecord | None:
        """Return the batch that was begun and is not done, None where there is none."""
        value = self.get_large("batch")
        if value is None:
            return None
        record = BatchRecord.from_json(value)
        return record if record.number == standing.number + 1 else None

    def skip(self, source: str, begin: Mapping[str, Any], end: Mapping[str, Any]) -> None:
        """Have a stretch of a source's log passed over. Takes the lease: raises LeaseLost where it runs.

        A batch that was begun and may hold the stretch is given up, under its number.
        """
        standing = self.take()
        begun = self.begun(standing)
        number = standing.number if begun is None else begun.number
        known = [*standing.skips.get(source, ()), [dict(begin), dict(end)]]
        self.write(replace(standing, number=number, skips={**standing.skips, source: known}))

    def rewind(
        self,
        source: str,
        offset: Mapping[str, Any],
        seen: Standing,
        keyless: Callable[[TableName], None] | None = None,
    ) -> None:
        """Read a source's log again from an earlier offset on, which was found from the standing `seen`.

        Statements that come again ask for their tables again, so what was asked for before is forgotten, and
        definitions are those of no place. Tables without a key, whose rows would be there twice, are read
        anew; `keyless` is called with each before anything is written, None tells that rows may come twice.
        Takes the lease: raises LeaseLost where it runs, PositionInvalid where it ran since.
        """
        standing = self.take()
        if (standing.generation, standing.offsets) != (seen.generation, seen.offsets):
            raise PositionInvalid(
                f"the pipeline {self.name} went on while its earlier place was looked for",
                hint=f"penstock pipelines pause {self.name}, then go back again",
            )
        known = self.get_large("tables") or {"tables": {}, "targets": []}
        of_source = {key: table for key, table in known["tables"].items() if split_key(key)[0] == source}
        again = [
            split_key(key)[1]
            for key, table in sorted(of_source.items())
            if keyless is not None and not table["gone"] and not Target.from_json(table["current"]).row_key
        ]
        for name in again:
            assert keyless is not None, "else none is read again"
            keyless(name)
        begun = self.begun(standing)
        number = standing.number if begun is None else begun.number
        self._forget_requests(source)
        for name in again:
            self.request_resnapshot(source, name, remove=False)
        for table in of_source.values():
            table["logged"] = table["keys"] = None
        self.put_large("tables", known)
        # Whoever dies before this has asked for more than is needed, and lost nothing.
        self.write(replace(standing, number=number, offsets={**standing.offsets, source: dict(offset)}))

    def _forget_requests(self, source: str) -> None:
        """Have statements ask again: what waits or runs by a statement's number gets one of its own."""
        for wish in self.requests():
            is_of_statement = "-" not in wish.number
            if wish.source == source and (wish.ended_us or is_of_statement):
                if not wish.ended_us:
                    self.request_resnapshot(source, wish.table, wish.where, remove=wish.remove)
                self.store.delete(self._at("requests", wish.number))

    # --- Values of any size -----------------------------------------------------------------

    def put_large(self, name: str, value: Any, version: int | None = None) -> int:
        """Write a JSON value of any size, whole or not at all: pages first, then what names them.

        Returns its version; raises VersionConflict where `version` is given and is not the one there.
        """
        data = zlib.compress(json.dumps(value).encode(), 1)
        path = self._at(name)
        before = self.store.get(path)
        pages = [data[at : at + _PAGE_BYTES] for at in range(0, len(data), _PAGE_BYTES)]
        tag = ""
        if len(pages) == 1:
            written = self.store.put(path, b"\0" + pages[0], version)
        else:
            tag = uuid.uuid4().hex[:12]
            for number, page in enumerate(pages):
                self.store.put(path + path_of(tag, str(number)), page)
            written = self.store.put(path, json.dumps({"tag": tag, "pages": len(pages)}).encode(), version)
        if before is not None and not before.value.startswith(b"\0"):
            self._drop_pages(path, before.value)
        if version is not None and name not in self._swept:
            # Pages of a writer that died before it could name them; whoever is fenced names none any more.
            self._swept.add(name)
            for left in self.store.list(path):
                if decoded_name(left) != tag:
                    self._delete_below(f"{path}/{left}")
        return written

    def get_large(self, name: str) -> Any:
        """Return what `put_large` wrote, None where nothing was."""
        path = self._at(name)
        record = self.store.get(path)
        if record is None:
            return None
        with reading_record(f"{path} in the state of a pipeline", HINT_STATE):
            if record.value.startswith(b"\0"):
                return json.loads(zlib.decompress(record.value[1:]))
            head = json.loads(record.value)
            data = b""
            for number in range(head["pages"]):
                page = self.store.get(path + path_of(head["tag"], str(number)))
                if page is None:
                    raise VersionConflict(f"{path} was rewritten while it was read")
                data += page.value
            return json.loads(zlib.decompress(data))

    def drop_large(self, name: str) -> None:
        """Delete what `put_large` wrote."""
        path = self._at(name)
        record = self.store.get(path)
        if record is not None:
            self.store.delete(path)
            # Also the pages of a writer that died before it could name them.
            for tag in self.store.list(path):
                self._delete_below(f"{path}/{tag}")

    def _drop_pages(self, path: str, head: bytes) -> None:
        found = json.loads(head)
        for number in range(found["pages"]):
            self.store.delete(path + path_of(found["tag"], str(number)))

    # --- Resnapshots ------------------------------------------------------------------------

    def request_resnapshot(
        self,
        source: str,
        table: TableName,
        where: str | None = None,
        *,
        remove: bool = True,
        number: str | None = None,
    ) -> str:
        """Ask the pipeline to read a table of a source again; return the request's number.

        Rows of the source come as they are then; with `remove` the target's rows that the source has not go.
        `where` restricts both, and is a condition on the source's columns in the server's SQL. Who gives a
        `number` asks once, however often it is called. Raises OptionInvalid where the pipeline never ran.
        """
        if self.standing() is None:
            raise OptionInvalid(
                f"the pipeline {self.name} never ran", hint="penstock run pipeline.yaml loads its tables"
            )
        asked = number or f"{time.time_ns() // 1000:x}-{uuid.uuid4().hex[:6]}"
        wish = Resnapshot(asked, source, table, where, remove, asked_us=time.time_ns() // 1000)
        try:
            self.store.put(self._at("requests", asked), wish.encode(), ABSENT)
        except VersionConflict:
            if number is None:
                raise
        return asked

    def requests(self) -> list[Resnapshot]:
        """Return every request there is, by number: those that wait or run, and the last hundred that have
        ended."""
        numbers = [decoded_name(name) for name in self.store.list(self._at("requests"))]
        self._ended = {number: wish for number, wish in self._ended.items() if number in numbers}
        found = []
        for number in numbers:
            wish = self._ended.get(number) or self.request(number)
            if wish is None:
                continue
            if wish.ended_us:
                self._ended[number] = wish
            found.append(wish)
        return found

    def request(self, number: str) -> Resnapshot | None:
        """Return one request, None where there is none of this number."""
        record = self.store.get(self._at("requests", number))
        return None if record is None else Resnapshot.decode(record.value)

    def note_request(self, wish: Resnapshot, state: str, what: str = "") -> None:
        """Note what became of a request: running, done or failed, and why. Older ended ones are forgotten."""
        ended = time.time_ns() // 1000 if state in ("done", "failed") else 0
        noted = replace(wish, state=state, what=what, ended_us=ended)
        self.store.put(self._at("requests", wish.number), noted.encode())
        if ended:
            known = [one for one in self.requests() if one.ended_us]
            for old in sorted(known, key=lambda one: one.ended_us)[:-_ENDED_REQUESTS_KEPT]:
                self.store.delete(self._at("requests", old.number))

    # --- Pause, progress, reset -------------------------------------------------------------

    def pause(self, why: str = "") -> None:
        """Keep the pipeline from running; one that runs stops after its batch."""
        value = {"why": why, "since_us": time.time_ns() // 1000}
        self.store.put(self._at("pause"), json.dumps(value).encode())

    def resume(self) -> None:
        """Let the pipeline run."""
        self.store.delete(self._at("pause"))

    @property
    def paused(self) -> bool:
        """Whether the pipeline is not to run."""
        return self.store.get(self._at("pause")) is not None

    def pause_told(self) -> str | None:
        """Return in words that the pipeline is paused, and why; None where it is not."""
        record = self.store.get(self._at("pause"))
        if record is None:
            return None
        with reading_record("the pause of a pipeline", HINT_STATE):
            why = str(json.loads(record.value)["why"])
        return f"the pipeline {self.name} is paused" + (f": {why}" if why else "")

    def show(self, progress: Mapping[str, Any]) -> None:
        """Write what the runner shows of itself, plain JSON values."""
        self.store.put(self._at("progress"), zlib.compress(json.dumps(dict(progress)).encode(), 1))

    def shown(self) -> dict[str, Any]:
        """Return what a runner showed last, {} where none did."""
        record = self.store.get(self._at("progress"))
        with reading_record("what a pipeline shows of itself", HINT_STATE):
            return {} if record is None else dict(json.loads(zlib.decompress(record.value)))

    def reset(self) -> None:
        """Forget everything but where it stood, the names of its targets and whether it is paused.

        The next run begins anew, under another generation, and finds by these names what its sources have no
        longer. A reset that dies before the end is finished by whoever takes the pipeline next.

        Raises LeaseLost while the pipeline runs.
        """
        if (runner := self.runner()) is not None:
            raise LeaseLost(
                f"the pipeline {self.name} is run by {runner.name}",
                hint=f"penstock pipelines pause {self.name}, and wait until it has stopped",
            )
        standing = self.standing()
        if standing is not None:
            # A source that has not begun since the last reset is where it was before that.
            self.put_large("reset", {**(standing.earlier or {}), **standing.offsets})
            self.store.delete(self._at("standing"))
        self._clear()

    def _clear(self) -> None:
        """Delete what belongs to a standing that is gone; of its tables the names of the targets stay."""
        known = self.get_large("tables") or {"targets": []}
        written = {*known.get("written", ()), *(str(Target.from_json(one).name) for one in known["targets"])}
        if written:
            self.put_large("tables", {"tables": {}, "targets": [], "written": sorted(written)})
        kept = (*_OUTLIVES_RESET, "tables") if written else _OUTLIVES_RESET
        for name in self.store.list(self._path):
            if decoded_name(name) not in kept:
                self._delete_below(f"{self._path}/{name}")

    def _delete_below(self, path: str) -> None:
        for name in self.store.list(path):
            self._delete_below(f"{path}/{name}")
        self.store.delete(path)

    def _at(self, *names: str) -> str:
        return self._path + path_of(*names)
