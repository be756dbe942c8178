# SPDX-License-Identifier: Apache-2.0
"""The options of a subscription, parsed and validated before anything is opened."""

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from penstock.client.daemons import Start
from penstock.client.flow import FailurePolicy
from penstock.coordinate.store import SESSION_SECONDS
from penstock.errors import OptionInvalid
from penstock.limits import BATCH_ROWS_MAX
from penstock.model import Secret, ServerAddress, TablePatterns, Tls, is_server_url
from penstock.source.asked_changes import change_types, sent_columns
from penstock.source.bounds import BoundText
from penstock.source.daemon_address import DaemonAddress

CHECKPOINT = "checkpoint"
COMPRESSIONS = ("none", "lz4", "zstd")


@dataclass(frozen=True)
class SubscriberOptions:
    """The options of one member of a subscription; see `penstock.client.sync.Subscriber`.

    A `start` of None continues from the checkpoint. A `shards` of None means the subscription's number of
    shards, or 1 for a new subscription.
    """

    address: DaemonAddress | ServerAddress
    name: str
    member: str
    # Left out of the representation, because the URL of a store may contain a password.
    coordination: str = field(repr=False)
    tables: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    shards: int | None = None
    shard_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    changes: tuple[str, ...] | None = None
    where: str | None = None
    columns: tuple[str, ...] | None = None
    batch_rows: int = BATCH_ROWS_MAX
    compression: str = "none"
    start: Start | None = None
    begin: Start = field(default_factory=lambda: Start(end="latest"))
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    ack: str = "auto"
    checkpoint_seconds: float = 1.0
    session_seconds: float = SESSION_SECONDS

    @property
    def instance(self) -> str:
        """The instance to follow."""
        return self.address.instance if isinstance(self.address, DaemonAddress) else self.address.name

    def request(self) -> dict[str, Any]:
        """Return the body of the `changes` call, without shards and start."""
        body = {
            "subscriber": f"{self.name}/{self.member}",
            "tables": list(self.tables),
            "exclude": list(self.exclude),
            "changes": None if self.changes is None else list(self.changes),
            "where": self.where,
            "columns": None if self.columns is None else list(self.columns),
            "batch_rows": self.batch_rows,
            "compression": self.compression,
        }
        return body


class Options(TypedDict, total=False):
    """The options of a subscriber; `penstock.client.sync.Subscriber` explains them."""

    tables: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    shards: int | None
    shard_columns: Mapping[str, Sequence[str]] | None
    changes: Sequence[str] | None
    where: str | None
    columns: Sequence[str] | None
    batch_rows: int
    compression: str
    start: BoundText
    begin: BoundText
    coordination: str | None
    state: str | os.PathLike[str] | None
    on_failure: str
    retries: int | None
    ack: str
    checkpoint_seconds: float
    session_seconds: float
    member: str | None
    token: str | Secret | None
    token_file: str | None
    tls: Tls | None


def read_options(
    source: str | DaemonAddress | ServerAddress,
    *,
    name: str,
    tables: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    shards: int | None = None,
    shard_columns: Mapping[str, Sequence[str]] | None = None,
    changes: Sequence[str] | None = None,
    where: str | None = None,
    columns: Sequence[str] | None = None,
    batch_rows: int = BATCH_ROWS_MAX,
    compression: str = "none",
    start: BoundText = CHECKPOINT,
    begin: BoundText = "latest",
    coordination: str | None = None,
    state: str | os.PathLike[str] | None = None,
    on_failure: str = "retry",
    retries: int | None = None,
    ack: str = "auto",
    checkpoint_seconds: float = 1.0,
    session_seconds: float = SESSION_SECONDS,
    member: str | None = None,
    token: str | Secret | None = None,
    token_file: str | None = None,
    tls: Tls | None = None,
) -> SubscriberOptions:
    """Parse and validate the options. Raises OptionInvalid."""
    if isinstance(source, str):
        source = _address(source, token, token_file, tls)
    _refuse_names(name, member)
    patterns = TablePatterns(_as_list(tables), _as_list(exclude))
    if shards is not None and shards < 1:
        raise OptionInvalid(f"shards {shards} is less than 1", hint="Use 1 for all rows in one order")
    if batch_rows < 1:
        raise OptionInvalid(f"batch_rows {batch_rows} is less than 1")
    if not checkpoint_seconds >= 0:
        raise OptionInvalid(f"checkpoint_seconds {checkpoint_seconds} is less than 0")
    if compression not in COMPRESSIONS:
        raise OptionInvalid(
            f"compression {compression!r} is unknown", hint=f"Use one of {', '.join(COMPRESSIONS)}"
        )
    return SubscriberOptions(
        address=source,
        name=name,
        member=member or default_member(),
        coordination=_store_url(coordination, state),
        tables=patterns.include,
        exclude=patterns.exclude,
        shards=shards,
        shard_columns={table: tuple(names) for table, names in (shard_columns or {}).items()},
        changes=change_types(changes),
        where=where,
        columns=sent_columns(columns),
        batch_rows=batch_rows,
        compression=compression,
        start=None if start == CHECKPOINT else Start.parse(start),
        begin=Start.parse(begin),
        policy=FailurePolicy(on_failure, retries),
        ack=ack,
        checkpoint_seconds=checkpoint_seconds,
        session_seconds=session_seconds,
    )


def _address(
    source: str, token: str | Secret | None, token_file: str | None, tls: Tls | None
) -> DaemonAddress | ServerAddress:
    if not is_server_url(source):
        return DaemonAddress.parse(source, token=token, token_file=token_file, tls=tls)
    if token is not None or token_file is not None:
        raise OptionInvalid(
            "a token is for a daemon", hint="Write the source as penstock://host:7070/instance"
        )
    return ServerAddress.parse(source, tls=tls)


def _store_url(coordination: str | None, state: str | os.PathLike[str] | None) -> str:
    """Return the URL of the store of positions. `state` may also be the path of an SQLite file."""
    if state is None:
        return coordination or default_coordination()
    if coordination is not None:
        raise OptionInvalid("state and coordination name two stores", hint="Leave one of them out")
    text = os.fspath(state)
    return text if "://" in text else f"sqlite://{Path(text).absolute()}"


def default_coordination() -> str:
    """Return the default store: an SQLite file in the user's state folder, which all of the user's programs
    share.
    """
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return f"sqlite://{Path(state).absolute() / 'penstock' / 'coordination.db'}"


def default_member() -> str:
    """Return a unique member name: host, process, and a random suffix."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def _as_list(patterns: str | Sequence[str] | None) -> str | list[str] | None:
    return patterns if patterns is None or isinstance(patterns, str) else list(patterns)


def _refuse_names(name: str, member: str | None) -> None:
    for what, value in (("name", name), ("member", member)):
        if value is not None and (not value.strip() or "/" in value):
            raise OptionInvalid(
                f"{what} {value!r} cannot be a {what}",
                hint='Use letters, without "/": the daemon shows NAME/MEMBER',
            )
