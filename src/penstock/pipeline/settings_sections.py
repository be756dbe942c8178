# SPDX-License-Identifier: Apache-2.0
"""The sections of a pipeline file as they are written; `penstock.pipeline.settings` resolves them."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from penstock.limits import MIB, RANGE_BYTES_DEFAULT, SHARDS_MAX
from penstock.model import SSL_MODES, Secret, ServerAddress, TablePatterns, Tls, is_server_url
from penstock.settings.values import (
    Bytes,
    Seconds,
    SecretText,
    Section,
    TablePatternTexts,
    further_server,
    one_secret,
    store_url,
    validate_option,
)
from penstock.sinks.sink import Evolution
from penstock.source.bounds import Bound, parse_bound
from penstock.source.daemon_address import is_daemon_url
from penstock.source.source import SourceOptions

EARLIEST, LATEST = "earliest", "latest"

_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,99}")


def validate_name(text: str) -> str:
    """Return a valid name of a pipeline, source or sink. Raises ValueError."""
    if not _NAME.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a valid name: use letters, digits, _ - and ., and do not start with . or -"
        )
    return text


def _names(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Name = Annotated[str, AfterValidator(validate_name)]
# One text, or a list of texts.
Texts = Annotated[tuple[str, ...], BeforeValidator(_names)]


class TlsSection(Section):
    """TLS settings of the connection."""

    mode: Literal["disabled", "preferred", "required", "verify_ca", "verify_identity"] = "preferred"
    ca: str | None = Field(default=None, description="a file with the certificate authorities to trust")
    cert: str | None = Field(default=None, description="a file with the client's certificate")
    key: str | None = Field(default=None, description="a file with the client's private key")

    def tls(self) -> Tls:
        """Return the TLS settings for connections. Raises OptionInvalid."""
        assert self.mode in SSL_MODES, "the modes of the model and of this section are the same"
        return Tls(self.mode, self.ca, self.cert, self.key)


class SourceSection(Section):
    """Where changes come from (a server, a daemon's instance, or files), and which tables to read."""

    # A URL may hold a password, so no representation shows it.
    url: str | None = Field(
        default=None,
        description="mysql://user@host:3306, mariadb://..., or a daemon's penstock://host:7070/instance",
        repr=False,
    )
    path: Texts = Field(
        default=(), description="binlog files, folders, glob patterns, or the folder of a kept log"
    )
    name: Name | None = Field(
        default=None,
        description="the instance name in rows of this source; default: host:port, or the daemon's instance",
    )
    user: str | None = None
    password: SecretText | None = None
    password_file: Path | None = None
    password_env: str | None = None
    token: SecretText | None = Field(default=None, description="the daemon's token; default: PENSTOCK_TOKEN")
    token_file: Path | None = None
    token_env: str | None = None
    server_id: int | None = Field(default=None, ge=1, lt=1 << 32, description="our server_id as a replica")
    tls: TlsSection | None = None
    tables: TablePatternTexts = Field(default=(), description="patterns: shop.orders, shop.*, /regex/")
    exclude: TablePatternTexts = Field(default=(), description="patterns of tables to exclude")
    start: str | None = Field(
        default=None,
        description="where to start reading changes: earliest, latest, a position, a GTID set or a time;"
        " default: where the full load begins, or without a load latest for a server and"
        " earliest for files",
    )
    server: str | None = Field(
        default=None,
        description="the MySQL server, mysql://..., for full loads and comparisons when the source is a"
        " daemon or files",
        repr=False,
    )
    servers: Texts = Field(
        default=(),
        description="more servers of the same cluster, host:port; tried in turn when the current server"
        " has not answered for ten seconds",
        repr=False,
    )
    schemas: Path | None = Field(
        default=None, description="a .sql or .json file with table definitions, for logs without column names"
    )
    fail_on_data_loss: bool = Field(
        default=True, description="true: stop if the log was purged; false: continue after the gap"
    )
    on_lost: Literal["stop", "resnapshot", "repair"] = Field(
        default="stop",
        description="if the log was purged: stop; or continue at its end and read every table again from the"
        " server (resnapshot), or compare every table and read only the rows that differ (repair); both"
        " delete rows that only the target has",
    )

    @field_validator("start")
    @classmethod
    def _valid_start(cls, start: str | None) -> str | None:
        if start is not None and start.strip().lower() not in (EARLIEST, LATEST):
            validate_option(partial(parse_bound, start))
        return start

    def over(self, defaults: "SourceSection") -> Self:
        """Return this section, with unset fields taken from another section."""
        own = {name: getattr(self, name) for name in self.model_fields_set}
        inherited = {name: getattr(defaults, name) for name in defaults.model_fields_set}
        return self.model_construct(**inherited | own)

    def options(self) -> SourceOptions:
        """Return the options that open the source. Raises ValueError, without any secret."""
        if (self.url is None) == (not self.path):
            raise ValueError("set either url or path")
        if self.url is not None and not (is_server_url(self.url) or is_daemon_url(self.url)):
            raise ValueError("url: write mysql://user@host:3306 or penstock://host:7070/instance")
        daemon = self.url is not None and is_daemon_url(self.url)
        # For a daemon or files, user and password belong to the server named by `server`.
        account = self.url is not None and not daemon
        options: dict[str, Any] = {
            "instance": self.name,
            "user": self.user if account else None,
            "password": self._password() if account else None,
            "server_id": self.server_id if account else None,
            "tls": self.tls.tls() if self.tls is not None else None,
            "token": one_secret(self.token, self.token_file, self.token_env, "token"),
        }
        location: Any = list(self.path) if self.url is None else self.url
        return validate_option(lambda: SourceOptions.parse(location, **options))

    def server_address(self) -> ServerAddress | None:
        """Return the server whose tables can be read. Raises ValueError, without any secret."""
        if self.url is not None and is_server_url(self.url):
            if self.server is not None:
                raise ValueError("server is only for a daemon or files: url already names the server")
            return self.options().address
        if self.server is None:
            return None
        url, password = self.server, self._password()
        return validate_option(
            lambda: ServerAddress.parse(url, user=self.user, password=password, server_id=self.server_id)
        )

    def server_addresses(self) -> tuple[ServerAddress, ...]:
        """Return every server of the cluster, in the order to try them. Raises ValueError."""
        first = self.server_address()
        if first is None:
            if self.servers:
                raise ValueError(
                    "servers lists more servers of the cluster, but neither url nor server names one"
                )
            return ()
        password = self._password()
        further = [further_server(text, first, password, self.server_id) for text in self.servers]
        return (first, *further)

    def start_bound(self) -> Bound | str | None:
        """Return where to start reading changes: a bound, EARLIEST, LATEST, or None if not set."""
        if self.start is None:
            return None
        text = self.start.strip()
        return text.lower() if text.lower() in (EARLIEST, LATEST) else parse_bound(text)

    def _password(self) -> Secret | None:
        return one_secret(self.password, self.password_file, self.password_env, "password")


@dataclass(frozen=True)
class StatePlace:
    """Where a pipeline keeps its state: the store's URL, and the pipeline's name in the store.

    `loads` is true if the pipeline begins with a full load.
    """

    name: str
    state: str
    loads: bool = True


def _load_mode(value: Any) -> Any:
    return {"mode": value} if isinstance(value, str) else value


class LoadSettings(Section):
    """The full load: what is read from the tables before their changes."""

    mode: Literal["full", "consistent", "none"] = Field(
        default="full",
        description="full: read every table in chunks, and a table without a key at one exact position of"
        " the log; consistent: the same as full; none: changes only",
    )
    chunk_rows: int = Field(default=200_000, ge=1, description="approximate rows per chunk")
    parallel: int | None = Field(
        default=None, ge=1, description="concurrent connections to one server; default: one per task"
    )
    rate: int | None = Field(
        default=None, ge=1, description="throttle: maximum rows per second over all tasks"
    )
    where: dict[str, str] = Field(
        default_factory=dict,
        description="table pattern to an SQL condition of the server: load only these rows",
    )

    @field_validator("where")
    @classmethod
    def _single_table_patterns(cls, where: dict[str, str]) -> dict[str, str]:
        for pattern, condition in where.items():
            if len(validate_option(partial(TablePatterns, pattern)).include) != 1:
                raise ValueError(f"{pattern!r} is not a single table pattern")
            if not condition.strip():
                raise ValueError(f"{pattern}: write a condition, such as created > '2026-01-01'")
        return where

    def where_of(self, database: str, table: str) -> str | None:
        """Return the condition of the first pattern that matches a table."""
        for pattern, condition in self.where.items():
            if TablePatterns(pattern).matches(database, table):
                return condition
        return None


class BatchSettings(Section):
    """The size of a batch and its parallelism."""

    bytes: Bytes = Field(
        default=512 * MIB, ge=4096, description="approximate bytes of log per batch, over all sources"
    )
    rows: int | None = Field(default=None, ge=1, description="approximate rows per batch")
    interval: Seconds | None = Field(
        default=None,
        description="minimum time from the start of one batch to the next; default: 1 second, and none with"
        " --local where all sources are daemons' instances and the sink makes no file for each batch",
    )
    parts: int | None = Field(
        default=None, ge=1, description="concurrent writers; default: the number of Spark cores"
    )
    range_bytes: Bytes = Field(default=RANGE_BYTES_DEFAULT, ge=4096, description="bytes of log per task")


class ErrorSettings(Section):
    """What to do after an error."""

    table: Literal["stop", "skip_table"] = Field(
        default="stop",
        description="an error limited to one table: stop the pipeline, or continue without the table",
    )
    rows: Literal["stop", "skip", "dead_letter"] = Field(
        default="stop",
        description="rows on which a step fails: stop the pipeline, skip and count them, or write them to"
        " the dead letter; a step's on_error overrides this",
    )
    retry_for: Seconds = Field(
        default=600.0, description="how long to retry a source or target that does not answer"
    )


class LoopSettings(Section):
    """How to recognize and drop changes that a pipeline itself wrote into the source (replication loops)."""

    server_ids: tuple[int, ...] = Field(
        default=(), description="drop changes from these server ids, such as a server that replicates back"
    )
    gtid_tags: Texts = Field(
        default=(), description="drop transactions whose GTID has one of these tags (MySQL 8.3)"
    )
    mark_table: str | None = Field(
        default=None, description="database.table: drop transactions that write to this table"
    )
    drainer_channels: tuple[int, ...] = Field(
        default=(),
        description="drop transactions that a TiDB-Binlog Drainer with one of these channel ids wrote",
    )

    @property
    def has_marks(self) -> bool:
        """Whether transactions are recognized by a table that they write."""
        return self.mark_table is not None or bool(self.drainer_channels)


class SinkTablesSection(Section):
    """Which source tables' rows are written to one of several sinks."""

    tables: TablePatternTexts = Field(
        default=(), description="patterns of source tables; default: every table of the pipeline"
    )
    exclude: TablePatternTexts = Field(default=(), description="patterns of source tables to exclude")


class PipelineSection(Section):
    """The whole pipeline file, except for the settings of steps and sink."""

    name: Name | None = Field(
        default=None, description="the pipeline's name in the state store; default: the file's name"
    )
    state: str | None = Field(
        default=None,
        description="the state store: sqlite:///path/file.db or zookeeper://host:2181/path; default:"
        " penstock-pipelines.db next to the file",
        repr=False,
    )
    source: SourceSection | None = Field(
        default=None, description="where changes come from; with `sources`, their common settings"
    )
    sources: tuple[SourceSection, ...] = Field(
        default=(), description="several sources, merged into one pipeline"
    )
    load: Annotated[LoadSettings, BeforeValidator(_load_mode)] = Field(default_factory=LoadSettings)
    steps: Any = ()
    sink: Any = None
    sinks: Any = None
    batch: BatchSettings = Field(default_factory=BatchSettings)
    schema_changes: Evolution = Field(
        default=Evolution.EVOLVE,
        description="when source columns change: evolve: add, drop, rename and widen the target's columns;"
        " add_only: only add; ignore: leave the target unchanged; stop: stop the table",
    )
    apply: Literal["parallel", "serial"] = Field(
        default="parallel",
        description="parallel: rows without a common key are written concurrently; serial: whole"
        " transactions, one after the other",
    )
    on_cascade: Literal["refuse", "reread", "ignore"] = Field(
        default="refuse",
        description="foreign keys whose actions the source does not log (such as ON DELETE CASCADE):"
        " refuse: do not start; reread: read child tables again after parent rows are deleted"
        " or change keys; ignore: keep child rows as they were logged",
    )
    shards: int = Field(
        default=1,
        ge=1,
        le=SHARDS_MAX,
        description="processes that share the tables, with --local: each target belongs to one of them, which"
        " has a position of its own",
    )
    errors: ErrorSettings = Field(default_factory=ErrorSettings)
    dead_letter: str | None = Field(
        default=None,
        description="a folder, or a URL such as s3://bucket/folder; default: NAME.dead-letter next to the"
        " file",
        repr=False,
    )
    loops: LoopSettings = Field(default_factory=LoopSettings)
    spark: dict[str, str] = Field(
        default_factory=dict, description="settings of the Spark session that `penstock run` creates"
    )

    @field_validator("state")
    @classmethod
    def _valid_store(cls, url: str | None) -> str | None:
        return None if url is None else store_url(url)

    @model_validator(mode="after")
    def _with_sources(self) -> Self:
        if self.source is None and not self.sources:
            raise ValueError("source is missing: set source.url or source.path")
        return self

    def all_sources(self) -> list[SourceSection]:
        """Return every source, with the common settings applied."""
        if not self.sources:
            assert self.source is not None, "one of both is given"
            return [self.source]
        return [section.over(self.source) if self.source is not None else section for section in self.sources]
