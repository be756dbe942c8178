# SPDX-License-Identifier: Apache-2.0
"""Redis: values, hashes and lists that mirror tables, or cache keys that are invalidated when a row changes.

Arrow arrays become Redis commands, which each task pipelines over one connection. Replaying a batch is
idempotent, except for lists.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy
import pyarrow
import pyarrow.compute as pc
from pydantic import Field

from penstock import _native
from penstock.changes import TAKES, Changes, Origin, Target, kinds_text
from penstock.errors import OptionInvalid
from penstock.model import Secret, TableName
from penstock.settings.values import Seconds
from penstock.sinks.endpoint import Endpoint
from penstock.sinks.images import last_of_each, puts, refuse_partial
from penstock.sinks.redis.cluster import ClusterPipeline
from penstock.sinks.redis.commands import FEW_ROWS_MAX, commands, hash_commands, join
from penstock.sinks.redis.connection import (
    HINT_CLUSTER,
    Pipeline,
    connect,
    is_cluster_node,
    matching_keys,
)
from penstock.sinks.sink import BatchMark, Delivery, Evolution, Finding, Receipt, Sink, Spread, Writer
from penstock.sinks.template import Template, column_texts, default_key

EXTRA = "redis"

_URL_DEFAULT = "redis://127.0.0.1:6379/0"
# Commands are encoded for this many bytes of rows at a time.
_BYTES_AT_ONCE = 64 << 20


class Settings(Endpoint):
    """A Redis server, and what is written to it for each row."""

    url: str = Field(default=_URL_DEFAULT, description="redis://host:port/db, rediss:// with TLS, or unix://")
    cluster: bool = Field(
        default=False,
        description="whether the server is a Redis Cluster; url then names one or several of its nodes,"
        " separated by commas",
    )
    write: Literal["set", "hash", "list", "invalidate"] = Field(
        default="set",
        description="set: the row as a value; hash: the row as a hash of columns; list: append changes to"
        " a list; invalidate: delete the keys of changed rows, for a cache filled by its"
        " readers",
    )
    key: str | None = Field(
        default=None, description="the key, a template; default: database:table:primary key"
    )
    value: str | None = Field(default=None, description="the value, a template; default: the row as JSON")
    expire: Seconds | None = Field(
        default=None, ge=0.001, description="time to live of a key after each write"
    )
    deletes: Literal["delete", "keep"] = Field(
        default="delete", description="what happens to the key of a deleted row"
    )
    push: Literal["left", "right"] = Field(default="right", description="the end of the list to push to")
    length_max: int | None = Field(default=None, ge=1, description="maximum length of a list")


class RedisSink(Sink):
    """Writes keys to a Redis server."""

    kind = "redis"
    keeps_connections = True
    # Write a table's rows in sequence: rows may share keys, and emptying a table deletes all of them.
    spread = Spread.TABLES

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.password: Secret | None = settings.secret()
        listed = settings.write == "list"
        self.delivery = Delivery.AT_LEAST_ONCE if listed else Delivery.IDEMPOTENT
        self.can_rewind = not listed
        # With a key template, an update may move a row to another key, so every image matters.
        self.keeps_state = self.shares_columns = settings.key is None and not listed
        self.load_spread = Spread.RANGES if self.keeps_state else None
        # Idle connections, reused for the many small batches at the head of a log.
        self._idle: deque[Pipeline | ClusterPipeline] = deque()
        self._templates: dict[TableName, tuple[Target, _Templates]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": deque(), "_templates": {}}

    def check(self) -> Sequence[Finding]:
        pipeline = self._connect()
        if isinstance(pipeline, ClusterPipeline):
            pipeline.connect_all()
        pipeline.close()
        if not self.settings.cluster and is_cluster_node(self.settings, self.password):
            what = "a node of a cluster, which has only some of its keys"
            return [Finding(self.settings.url, what, mend=HINT_CLUSTER)]
        return []

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        self.prepare(target, evolution)
        return [f"{self.settings.write} {self.key(target).text}"]

    def prepare(self, target: Target, evolution: Evolution) -> None:
        # There is nothing to create, but the templates must be valid.
        self.key(target)
        self.value(target)

    def check_together(self, targets: Sequence[Target]) -> None:
        """Raise OptionInvalid if emptying one table would delete keys of another table."""
        if self.settings.write not in ("set", "hash") or self.settings.deletes == "keep":
            return
        templates = sorted(
            ((self.key(target), target) for target in targets),
            key=lambda pair: pair[0].stem,
        )
        for number, (key, target) in enumerate(templates):
            for other, neighbour in templates[number + 1 :]:
                # The templates are sorted by stem. Once the stems differ, no later template can match.
                if not other.stem.startswith(key.stem):
                    break
                if key.may_equal(other):
                    raise OptionInvalid(
                        f"a TRUNCATE of {target.name} would delete {key.glob()}, and keys of {neighbour.name}"
                        f" are {other.glob()}",
                        hint="Let the keys of each table begin with a word of its own, such as order:{id}; or"
                        " keep them: deletes: keep",
                    )

    def key(self, target: Target) -> Template:
        """Return the template of a table's keys. Raises OptionInvalid."""
        if self.settings.key is not None:
            return Template(self.settings.key, target)
        if self.settings.write == "list":
            return Template("{database}:{table}", target)
        if not target.primary_key:
            raise OptionInvalid(
                f"{target.name} has no primary key that could name its rows",
                hint="Give the redis sink a template: key: '{database}:{table}:{column}'",
            )
        return Template(default_key(target), target)

    def value(self, target: Target) -> Template | None:
        """Return the template of the values, None for the row as JSON. Raises OptionInvalid."""
        return None if self.settings.value is None else Template(self.settings.value, target)

    def templates(self, target: Target) -> "_Templates":
        """Return the templates of a table, which are the same in all its batches. Raises OptionInvalid."""
        known = self._templates.get(target.name)
        if known is None or known[0] is not target:
            known = self._templates[target.name] = target, _Templates(self.key(target), self.value(target))
        return known[1]

    def open(self, mark: BatchMark, part: int) -> Writer:
        return _Writer(self)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def take_connection(self) -> Pipeline | ClusterPipeline:
        """Return a connection that is ready for commands. Propagates errors from `connect`."""
        while self._idle:
            pipeline = self._idle.pop()
            if pipeline.is_open:
                return pipeline
            pipeline.close()
        return self._connect()

    def _connect(self) -> Pipeline | ClusterPipeline:
        if self.settings.cluster:
            return ClusterPipeline(self.settings, self.password)
        return connect(self.settings, self.password)

    def give_back(self, pipeline: Pipeline | ClusterPipeline) -> None:
        """Keep a connection for the next batch. It must have no pending commands."""
        pipeline.bytes = 0
        self._idle.append(pipeline)


make = RedisSink


class _Templates(NamedTuple):
    """The templates of a table's keys and values."""

    key: Template
    value: Template | None


class _Writer(Writer):
    """Writes one task's part."""

    def __init__(self, sink: RedisSink) -> None:
        self._sink = sink
        self._settings = sink.settings
        self._pipeline: Pipeline | ClusterPipeline | None = None
        self._rows: Counter[str] = Counter()
        self._unrepresentable: Counter[str] = Counter()

    def write(self, changes: Changes) -> None:
        if self._settings.write == "invalidate" and changes.origin is Origin.LOAD:
            # A full load changes nothing, so no cached value is outdated.
            return
        if not self._sink.keeps_state:
            # Partial images of state rows are refused before they reach the sink.
            refuse_partial(changes)
        step = max(1, len(changes) * _BYTES_AT_ONCE // max(1, changes.rows.nbytes))
        for start in range(0, len(changes), step):
            piece = changes.with_rows(changes.rows.slice(start, step))
            if self._settings.write == "list":
                self._push(piece)
            else:
                self._apply(piece)
        self._rows[str(changes.target.name)] += len(changes)

    def empty(self, target: Target, version: int) -> None:
        if self._settings.write == "list" or self._settings.deletes == "keep":
            return
        with self.working_on(target.name):
            pattern = self._pattern(target)
        pipeline = self._open()
        # Earlier commands must be complete, so that the scan finds their keys.
        pipeline.finish()
        if isinstance(pipeline, ClusterPipeline):
            pages = pipeline.matching_keys(pattern)
        else:
            pages = matching_keys(self._settings, self._sink.password, pattern)
        for keys in pages:
            self._delete(keys)

    def _pattern(self, target: Target) -> str:
        """Return the pattern of a table's keys. Raises OptionInvalid if it would match keys of other
        tables.
        """
        pattern = self._sink.key(target).glob()
        if not pattern.strip("*?"):
            raise OptionInvalid(
                f"{target.name} was emptied, and the template of its keys begins like every other key",
                hint="Begin the key with a prefix of its own: key: 'order:{id}'",
            )
        return pattern

    def finish(self) -> Receipt:
        written = 0
        if self._pipeline is not None:
            self._pipeline.finish()
            written = self._pipeline.bytes
            self._sink.give_back(self._pipeline)
            self._pipeline = None
        return Receipt(sum(self._rows.values()), written, self._rows, (), self._unrepresentable)

    def abort(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None

    def _open(self) -> Pipeline | ClusterPipeline:
        if self._pipeline is None:
            self._pipeline = self._sink.take_connection()
        return self._pipeline

    def _apply(self, changes: Changes) -> None:
        """Apply the last event of each key."""
        keys = self._sink.templates(changes.target).key.texts(changes)
        if self._settings.write == "invalidate":
            self._delete(pc.unique(keys.drop_null()))
            return
        if _are_all_set(changes, keys):
            self._set(keys, changes)
            return
        last = last_of_each([pyarrow.chunked_array([keys])], numpy.arange(len(keys)))
        newest = numpy.zeros(len(keys), numpy.bool_)
        newest[last] = True
        kept = pc.and_(keys.is_valid(), pyarrow.array(newest))
        is_written = puts(changes.rows)
        if self._settings.deletes == "delete" and is_written.false_count:
            self._delete(keys.filter(pc.and_not(kept, is_written)))
        changes, keys = _filtered(changes, keys, pc.and_(kept, is_written))
        if len(changes):
            self._set(keys, changes)

    def _delete(self, keys: pyarrow.Array) -> None:
        if len(keys):
            self._open().send(commands(["UNLINK", keys]), keys)

    def _set(self, keys: pyarrow.Array, changes: Changes) -> None:
        if self._settings.write == "hash":
            self._set_hashes(keys, changes)
            return
        words: list[Any] = ["SET", keys, self._values(changes)]
        if self._settings.expire is not None:
            words += ["PX", self._milliseconds]
        self._open().send(commands(words), keys)

    def _set_hashes(self, keys: pyarrow.Array, changes: Changes) -> None:
        columns = [(name, column_texts(changes, name)) for name in changes.target.column_names]
        pipeline = self._open()
        for encoded, command_keys in hash_commands(keys, columns):
            pipeline.send(encoded, command_keys)
        if self._settings.expire is not None:
            pipeline.send(commands(["PEXPIRE", keys, self._milliseconds]), keys)

    def _push(self, changes: Changes) -> None:
        """Push inserted, updated and deleted rows to the lists, in order."""
        listed = pc.not_equal(changes.rows.column("_change_type"), "update_preimage")
        changes = changes.with_rows(changes.rows.filter(listed))
        keys = self._sink.templates(changes.target).key.texts(changes)
        kept = pc.is_valid(keys)
        changes, keys = changes.with_rows(changes.rows.filter(kept)), keys.filter(kept)
        if not len(keys):
            return
        settings = self._settings
        word = "LPUSH" if settings.push == "left" else "RPUSH"
        encoded = [commands([word, keys, self._values(changes)])]
        if settings.length_max is not None:
            ends = (
                ["0", str(settings.length_max - 1)]
                if settings.push == "left"
                else [f"-{settings.length_max}", "-1"]
            )
            encoded.append(commands(["LTRIM", keys, *ends]))
        if settings.expire is not None:
            encoded.append(commands(["PEXPIRE", keys, self._milliseconds]))
        # The commands of a row are adjacent, so that no list ever exceeds its limit.
        self._open().send(join(encoded), keys, len(encoded))

    def _values(self, changes: Changes) -> pyarrow.Array:
        value = self._sink.templates(changes.target).value
        if value is not None:
            texts = value.texts(changes)
            return pc.fill_null(texts, "") if texts.null_count else texts
        target, rows = changes.target, changes.rows
        objects = pyarrow.array(
            _native.json_objects(rows, target.declared, mariadb=target.mariadb, exact=True)
        )
        if self._settings.write != "list":
            return objects
        versions = rows.column("_commit_version").cast(pyarrow.string())
        head = ['{"change":"', rows.column("_change_type"), '","commit_version":', versions, ',"row":']
        return join([*head, objects, "}"])

    @property
    def _milliseconds(self) -> str:
        assert self._settings.expire is not None
        return str(round(self._settings.expire * 1000))


def _are_all_set(changes: Changes, keys: pyarrow.Array) -> bool:
    """Return whether a few rows all set a value, each of another key. Choosing rows then costs more than
    writing them.
    """
    if len(keys) > FEW_ROWS_MAX or keys.null_count or len(set(keys.to_pylist())) < len(keys):
        return False
    kinds = kinds_text(changes.rows)
    return not any(kind.encode() in kinds for kind in TAKES)


def _filtered(
    changes: Changes, keys: pyarrow.Array, chosen: pyarrow.BooleanArray
) -> tuple[Changes, pyarrow.Array]:
    """Return the chosen rows and their keys."""
    if chosen.true_count == len(chosen):
        # Filtering a few rows costs more than writing them.
        return changes, keys
    return changes.with_rows(changes.rows.filter(chosen)), keys.filter(chosen)
