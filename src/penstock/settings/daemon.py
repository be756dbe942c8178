# SPDX-License-Identifier: Apache-2.0
"""The daemon's settings: `penstock.yaml`, read and validated completely before anything starts.

  listen: {http: 127.0.0.1:7070, token_env: PENSTOCK_TOKEN}
  log: {folder: /var/lib/penstock, retention: {age: 24h}}
  instances:
    shop: {source: mysql://repl@db1, servers: [db2], password_file: /run/secrets/repl}

This module imports only `errors`, `limits`, `model` and the other modules of this package: `listen` has the
listeners and accounts, `values` the value types. An unknown name is rejected with the nearest known name, and
all problems of a file are reported together. A secret comes from `${NAME}`, a variable or a file, and no
representation shows it.
"""

import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator

from penstock.errors import OptionInvalid
from penstock.limits import (
    LISTENER_PROCESSES_MAX,
)
from penstock.model import Secret, ServerAddress, is_loopback, is_server_url
from penstock.settings.alerts import AFTER_SECONDS_DEFAULT, AlertSettings
from penstock.settings.console import ConsoleSection
from penstock.settings.file import Document, Problem, read_yaml, refuse, translate_validation_errors
from penstock.settings.fleet import FleetSettings
from penstock.settings.listen import (
    LISTENERS,
    LOOPBACK_DEFAULT,
    PORT_DEFAULT,
    AccountSettings,
    Listening,
    ListenSettings,
    split_host_port,
)
from penstock.settings.log import LogOverrides, LogSettings, RetentionSettings
from penstock.settings.merges import check_merges, merged_instances
from penstock.settings.telemetry import MetricsSettings, TelemetrySettings
from penstock.settings.ticdc import TicdcSettings, check_ticdc_url, is_ticdc_url
from penstock.settings.tidb import TidbSettings, is_tidb_url, parse_commit_ts, pd_addresses
from penstock.settings.values import (
    Seconds,
    SecretEnv,
    SecretText,
    Section,
    TablePatternTexts,
    bytes_of,
    columns_by_table,
    conditions_by_table,
    further_server,
    one_secret,
    seconds_of,
    secrets_unread,
    store_url,
    validate_option,
)

# Names that other packages import from here, wherever they are defined.
__all__ = [
    "LISTENERS",
    "LOOPBACK_DEFAULT",
    "PORT_DEFAULT",
    "AccountSettings",
    "InstanceSettings",
    "ListenSettings",
    "Listening",
    "LogOverrides",
    "LogSettings",
    "RetentionSettings",
    "Settings",
    "bytes_of",
    "is_loopback",
    "json_schema",
    "load_settings",
    "seconds_of",
    "split_host_port",
]

_INSTANCE_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,99}")
# A secret that consists of a single ${NAME}.
_ONE_VARIABLE = re.compile(r"\$\{(\w+)\}")

_COORDINATION_FILE = "coordination.db"


def _instance_name(text: str) -> str:
    if not _INSTANCE_NAME.fullmatch(text):
        raise ValueError(f"{text!r} is no name: use letters, digits, _ - and ., and begin with no . or -")
    return text


InstanceName = Annotated[str, AfterValidator(_instance_name)]


# --- Instances ------------------------------------------------------------------------------


class InstanceSettings(Section):
    """One captured cluster: its servers, the account for connecting to them, and where capture starts if the
    log is empty.
    """

    # A URL may contain a password, so no representation shows it.
    source: str = Field(
        default="",
        description="mysql://user@host:port: the first server to connect to; tidb://pd1:2379,pd2:2379: the"
        " PD members of a TiDB cluster; ticdc+file:///folder, ticdc+s3://bucket/prefix or ticdc+kafka://broker:9092/topic:"
        " what TiCDC wrote",
        repr=False,
    )
    merge: tuple[str, ...] = Field(
        default=(),
        description="instead of source: other instances, whose changes this one has in commit order",
    )
    servers: tuple[str, ...] = Field(
        default=(), description="more servers of the cluster, host:port, tried in turn", repr=False
    )
    password: SecretText | None = None
    password_file: Path | None = None
    password_env: SecretEnv = Field(default=None, validate_default=True)
    server_id: int | None = Field(
        default=None, ge=1, lt=1 << 32, description="our server_id as a replica; default: random"
    )
    tables: TablePatternTexts = Field(
        default=(), description="tables for readers that do not select any; the log keeps all tables"
    )
    exclude_tables: TablePatternTexts = ()
    shard_columns: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="table pattern to the columns that determine a row's shard; default: the primary key",
    )
    canal_gtid: bool = Field(
        default=False, description="Canal messages carry the set of executed GTIDs, as with Canal's gtidon"
    )
    canal_filters: bool = Field(
        default=False,
        description="Canal clients never see exclude_tables, and see only tables unless they send a filter,"
        " as with Canal's filter.black.regex and filter.regex",
    )
    canal_where: dict[str, str] = Field(
        default_factory=dict,
        description="table pattern to the condition of the rows that Canal clients receive",
    )
    canal_columns: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="table pattern to the only columns that Canal clients receive, besides the primary key",
    )
    start: str = Field(
        default="latest",
        description="where an empty log starts: earliest, latest, a position, a GTID set or a time;"
        " commit_ts:470639217768660992 starts after a commit timestamp of TiDB",
    )
    fail_over_after: Seconds = Field(
        default=10.0,
        description="how long to retry the current server before failing over to the next; doubles with"
        " each fail-over in the last hour",
    )
    fail_on_data_loss: bool = Field(
        default=True,
        description="true: stop if the server purged the next log; false: continue after the gap",
    )
    semi_sync: bool = Field(
        default=False,
        description="acknowledge commits to the server once they are durable (semi-synchronous replication)",
    )
    log: LogOverrides = Field(default_factory=LogOverrides)
    weight: float = Field(
        default=1.0,
        gt=0,
        description="the instance's share of a member's load, where a fleet shares instances",
    )
    zone: str | None = Field(
        default=None, description="the zone whose members capture the instance while there are any"
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description="an operator's words, by name, for penstock export --label"
    )
    tidb: TidbSettings = Field(
        default_factory=TidbSettings, description="how the instance takes part in its TiDB cluster"
    )
    ticdc: TicdcSettings = Field(default_factory=TicdcSettings, description="how the output of TiCDC is read")

    @field_validator("source")
    @classmethod
    def _a_server(cls, url: str) -> str:
        if is_tidb_url(url):
            pd_addresses(url)
            return url
        if is_ticdc_url(url):
            return check_ticdc_url(url)
        if not is_server_url(url):
            raise ValueError("it must be a server: mysql://user@host:3306, or a cluster: tidb://pd1:2379")
        validate_option(lambda: ServerAddress.parse(url, password=Secret("-")))
        return url

    @field_validator("servers")
    @classmethod
    def _more_servers(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        for text in servers:
            further_server(text, ServerAddress(), Secret("-"), None)
        return servers

    @field_validator("start")
    @classmethod
    def _not_empty(cls, start: str) -> str:
        if not start.strip():
            raise ValueError("write earliest, latest, a position, a GTID set or a time")
        return start.strip()

    @field_validator("shard_columns", "canal_columns")
    @classmethod
    def _one_table_pattern_each(cls, columns: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        return columns_by_table(columns)

    @field_validator("canal_where")
    @classmethod
    def _one_condition_each(cls, where: dict[str, str]) -> dict[str, str]:
        return conditions_by_table(where)

    @field_validator("merge")
    @classmethod
    def _several(cls, members: tuple[str, ...]) -> tuple[str, ...]:
        if len(members) < 2 or len(set(members)) < len(members):
            raise ValueError("name at least two instances, each once")
        return members

    @model_validator(mode="after")
    def _has_valid_addresses(self) -> Self:
        if bool(self.source) == bool(self.merge):
            raise ValueError(
                "source: name a server, mysql://user@host:3306, or in its place merge: [db1, db2]"
            )
        self.addresses()
        of_servers = "a MySQL or MariaDB server"
        kinds = dict.fromkeys(("servers", "server_id", "semi_sync", "fail_over_after"), of_servers)
        kinds |= {"tidb": "a tidb:// source", "ticdc": "a ticdc+ source"}
        own = (
            "a merge"
            if self.merge
            else kinds["tidb" if self.is_tidb else "ticdc" if self.is_ticdc else "servers"]
        )
        for field in sorted(kinds.keys() & self.model_fields_set):
            if kinds[field] != own:
                raise ValueError(f"{field}: only for {kinds[field]}")
        if own == of_servers and parse_commit_ts(self.start) is not None:
            raise ValueError("start: only a TiDB cluster has commit timestamps")
        return self

    @property
    def is_tidb(self) -> bool:
        """Whether the source is a TiDB cluster."""
        return is_tidb_url(self.source)

    @property
    def is_ticdc(self) -> bool:
        """Whether the source is the output of TiCDC."""
        return is_ticdc_url(self.source)

    def has_role(self, role: Literal["pump", "drainer"]) -> bool:
        """Return whether the instance plays a role in a TiDB cluster."""
        return self.is_tidb and role in self.tidb.roles

    @property
    def is_captured(self) -> bool:
        """Whether the instance has a log of changes. Only a TiDB cluster's Pump without a Drainer has
        none.
        """
        return not self.is_tidb or self.has_role("drainer")

    def addresses(self) -> list[ServerAddress]:
        """Return every server of the cluster in the order to try them. Raises ValueError.

        A further server that is written as host and port takes everything else from `source`. A TiDB cluster
        has the server of `tidb.sql`, or none. The output of TiCDC has no server, and neither has a merge.
        """
        password = one_secret(self.password, self.password_file, self.password_env, "password")
        if self.is_ticdc or self.merge:
            return []
        if self.is_tidb:
            sql = self.tidb.sql
            return [] if sql is None else [ServerAddress.parse(sql, password=password)]
        first = validate_option(
            lambda: ServerAddress.parse(self.source, password=password, server_id=self.server_id)
        )
        addresses = [first]
        for text in self.servers:
            addresses.append(further_server(text, first, password, self.server_id))
        return addresses


# --- The whole file -------------------------------------------------------------------------


class Settings(Section):
    """All of `penstock.yaml`."""

    listen: ListenSettings = Field(default_factory=ListenSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    instances: dict[InstanceName, InstanceSettings] = Field(min_length=1)
    access: tuple[AccountSettings, ...] = Field(
        default=(), description="accounts in addition to listen.token, which has all permissions"
    )
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
    alerts: AlertSettings | None = None
    console: ConsoleSection | None = Field(
        default=None, description="run the web console beside the daemon, in a process of its own"
    )
    # A URL may contain a password, so no representation shows it.
    coordination: str | None = Field(
        default=None,
        description="the coordination store for subscriptions, checkpoints and leases: sqlite:///path or"
        f" zookeeper://host:port,host:port/path; default: {_COORDINATION_FILE} in log.folder",
        repr=False,
    )
    processes: Literal["single", "per-instance"] | Annotated[int, Field(ge=1)] = Field(
        default="single",
        description="where instances are captured: single: in the daemon's own process; per-instance: each in"
        " a process of its own; a number: shared among that many processes",
    )
    listeners: Literal["single"] | Annotated[int, Field(ge=1, le=LISTENER_PROCESSES_MAX)] = Field(
        default="single",
        description="where followers and readers over HTTP, and clients of Canal and Ptubes, are served:"
        " single: in the daemon's own process; a number: by that many processes, which share the ports",
    )
    fleet: FleetSettings | None = Field(
        default=None,
        description="share the instances among the daemons of one coordination store; null: this daemon"
        " captures all of them",
    )

    @field_validator("access")
    @classmethod
    def _has_distinct_identities(cls, access: tuple[AccountSettings, ...]) -> tuple[AccountSettings, ...]:
        seen: dict[tuple[str, Any], str] = {}
        for account in access:
            identities = {"name": account.name, "user": account.user, "token": account.token_secret()}
            for kind, value in identities.items():
                if value is not None and (kind, value) in seen:
                    raise ValueError(f"{seen[kind, value]} and {account.name} have the same {kind}")
                seen[kind, value] = account.name
        return access

    @field_validator("coordination")
    @classmethod
    def _a_store(cls, url: str | None) -> str | None:
        return None if url is None else store_url(url)

    @field_validator("console")
    @classmethod
    def _finds_the_daemon(
        cls, console: ConsoleSection | None, validation: ValidationInfo
    ) -> ConsoleSection | None:
        listen = validation.data.get("listen")
        if console is not None and isinstance(listen, ListenSettings) and not listen.port:
            raise ValueError("the console needs to know the daemon's port: set listen.http")
        return console

    @model_validator(mode="after")
    def _can_be_shared(self) -> Self:
        for name in self.instances:
            log = self.log_of(name)
            if log.copies > 1 and self.fleet is None:
                raise ValueError(f"log.copies: {name} is to have copies, which other members of a fleet keep")
            if log.copies > 1 and (log.mode == "memory" or log.tier is not None):
                what = "a log in memory" if log.mode == "memory" else "a log with a tier"
                raise ValueError(f"log.copies: {name} has {what}, which is not copied")
            if log.serve == "durable" and (log.mode == "memory" or log.fsync == "never"):
                what = "log.mode memory" if log.mode == "memory" else "log.fsync never"
                raise ValueError(
                    f"log.serve: {name} has {what}, so that nothing would become durable in time"
                )
            if log.serve == "durable" and (self.processes != "single" or self.listeners != "single"):
                # Listeners in other processes read the log's files, which may contain data that is not
                # durable yet.
                raise ValueError(f"log.serve: {name} is durable, which needs processes and listeners: single")
        check_merges(self)
        if self.fleet is None:
            return self
        if isinstance(self.processes, int):
            raise ValueError("fleet: instances come and go, so each has its own: processes: per-instance")
        if self.coordination is None:
            raise ValueError("fleet: set coordination to the store that all members use")
        for name, instance in self.instances.items():
            # The logs of TiDB and of TiCDC have positions of their own, which mean nothing in the log of
            # another member.
            if instance.is_tidb or instance.is_ticdc:
                raise ValueError(f"fleet: {name} is a TiDB cluster, which a daemon without fleet captures")
        return self

    def pipelines_to_watch(self) -> tuple[tuple[str, ...], float]:
        """Return the pipeline files and state stores to watch, and for how long a run may retry."""
        alerts, console = self.alerts, self.console
        named = alerts.pipelines if alerts is not None and alerts.pipelines else ()
        shown = console.pipelines if console is not None else ()
        return named or shown, AFTER_SECONDS_DEFAULT if alerts is None else alerts.after

    def coordination_url(self) -> str:
        """Return the URL of the coordination store; the path of a file is absolute."""
        if self.coordination is None:
            return f"sqlite://{quote(os.path.abspath(self.log.folder / _COORDINATION_FILE))}"
        scheme, _, path = self.coordination.partition(":")
        # A relative path starts at the daemon's working directory, as elsewhere in the file.
        return (
            f"sqlite://{os.path.abspath(path.removeprefix('//'))}"
            if scheme == "sqlite"
            else self.coordination
        )

    def operator_token(self) -> Secret | None:
        """Return the token that the command line uses for this daemon: the token of `listen`, otherwise an
        admin's.

        Returns None if there is no token. Raises OptionInvalid if tokens are configured but none of them can
        be read.
        """
        problem: ValueError | None = None
        for read in (self.listen.secret, *(account.token_secret for account in self.access if account.admin)):
            try:
                if (token := read()) is not None:
                    return token
            except ValueError as unread:
                problem = problem or unread
        if problem is not None:
            raise OptionInvalid(
                f"the token for this daemon cannot be read: {problem}",
                hint="Make listen.token or the token of an admin available to this command",
            )
        return None

    def has_process(self, instance: str) -> bool:
        """Return whether an instance is captured in a separate process."""
        is_captured = self.instances[instance].is_captured
        is_alone = is_captured and instance not in merged_instances(self.instances)
        return self.processes != "single" and is_alone and self.log_of(instance).mode != "memory"

    def process_groups(self) -> list[list[str]]:
        """Return the instances of each capture process, [] if the daemon captures all instances itself.

        An instance whose log is in memory is always captured by the daemon itself.
        """
        if self.processes == "single":
            return []
        names = [name for name in self.instances if self.has_process(name)]
        count = len(names) if self.processes == "per-instance" else min(self.processes, len(names))
        return [names[number::count] for number in range(count)]

    def pump_log_of(self, instance: str) -> LogSettings:
        """Return the settings of the log of an instance's Pump, with `folder` set to the Pump's own
        folder.
        """
        log = self.log_of(instance)
        return log.model_copy(update={"folder": log.folder.with_name(f"{log.folder.name}.pump")})

    def log_of(self, instance: str) -> LogSettings:
        """Return the settings of an instance's log, with `folder` set to the instance's own folder."""
        overrides = self.instances[instance].log
        chosen = self.log.with_overrides(overrides)
        folder = overrides.folder or self.log.folder / instance
        return chosen.model_copy(update={"folder": folder})


def load_settings(
    path: str | Path,
    environment: Mapping[str, str] | None = None,
    *,
    with_secrets: bool = True,
    text: str | None = None,
    change: Callable[[Document], None] = lambda document: None,
) -> Settings:
    """Read and validate a settings file. Raises OptionInvalid, which lists all problems with line and path.

    The file is read unless its `text` is known. `change` changes the values before they are validated.

    Relative paths in the file start at the daemon's working directory. `${NAME}` is read from `environment`,
    by default from the environment of the process. Without `with_secrets`, a secret is read where it is used,
    because a command about a daemon needs at most one of them.
    """
    document = read_yaml(Path(path), os.environ if environment is None else environment, text=text)
    if not with_secrets:
        _name_variables_of_secrets(document)
    change(document)
    problems: list[Problem] = list(document.problems)
    settings = None
    try:
        accounts = isinstance(document.value, dict) and bool(document.value.get("access"))
        with nullcontext() if with_secrets else secrets_unread():
            settings = Settings.model_validate(document.value, context={"accounts": accounts})
    except ValidationError as error:
        problems += translate_validation_errors(error.errors(include_url=False), Settings)
    if problems or settings is None:
        raise refuse(str(path), document, problems)
    return settings


def _name_variables_of_secrets(document: Document) -> None:
    """Where a secret is a `${NAME}` that is not set, write `token_env: NAME` or `password_env: NAME` instead
    of the secret.
    """
    for problem in list(document.problems):
        *section_path, name = problem.path
        section = reduce(getitem, section_path, document.value)
        variable = _ONE_VARIABLE.fullmatch(str(section[name])) if name in ("token", "password") else None
        if variable is not None:
            del section[name]
            section[f"{name}_env"] = variable.group(1)
            document.problems.remove(problem)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a settings file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}
