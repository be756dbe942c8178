# SPDX-License-Identifier: Apache-2.0
"""DDL jobs: the records that TiDB keeps of each finished schema change, with the resulting definition.

A job's `binlog` object has the complete TableInfo or DBInfo after the change, so no SQL is parsed to follow
the schema. The action numbers are those of `model.ActionType` in TiDB.
"""

import json
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Self

from penstock.errors import EventMalformed

DELETE_ONLY = 1
_SYNCED, _DONE = 6, 4


class Action(IntEnum):
    """The job actions that need special handling. Every other action replaces one table's definition."""

    CREATE_SCHEMA = 1
    DROP_SCHEMA = 2
    CREATE_TABLE = 3
    DROP_TABLE = 4
    TRUNCATE_TABLE = 11
    RENAME_TABLE = 14
    CREATE_VIEW = 21
    DROP_VIEW = 24
    RECOVER_TABLE = 25
    MODIFY_SCHEMA_CHARSET = 26
    LOCK_TABLE = 27
    UNLOCK_TABLE = 28
    SET_TIFLASH_REPLICA = 30
    UPDATE_TIFLASH_REPLICA = 31
    CREATE_SEQUENCE = 34
    ALTER_SEQUENCE = 35
    DROP_SEQUENCE = 36
    EXCHANGE_PARTITION = 42
    RENAME_TABLES = 47
    TABLE_ATTRIBUTES = 49
    PARTITION_ATTRIBUTES = 50
    CREATE_PLACEMENT_POLICY = 51
    ALTER_PLACEMENT_POLICY = 52
    DROP_PLACEMENT_POLICY = 53
    PARTITION_PLACEMENT = 54
    SCHEMA_PLACEMENT = 55
    TABLE_PLACEMENT = 56
    CACHE_TABLE = 57
    TABLE_STATS_OPTIONS = 58
    NO_CACHE_TABLE = 59
    FLASHBACK_CLUSTER = 62
    RECOVER_SCHEMA = 63
    TTL_INFO = 65
    TTL_REMOVE = 67
    CREATE_RESOURCE_GROUP = 68
    ALTER_RESOURCE_GROUP = 69
    DROP_RESOURCE_GROUP = 70


# Statements that concern only how TiDB stores a table, or that MySQL does not have. They change no rows or
# columns.
NOT_LOGGED = frozenset(
    {
        Action.LOCK_TABLE,
        Action.UNLOCK_TABLE,
        Action.SET_TIFLASH_REPLICA,
        Action.UPDATE_TIFLASH_REPLICA,
        Action.CREATE_SEQUENCE,
        Action.ALTER_SEQUENCE,
        Action.DROP_SEQUENCE,
        Action.TABLE_ATTRIBUTES,
        Action.PARTITION_ATTRIBUTES,
        Action.CREATE_PLACEMENT_POLICY,
        Action.ALTER_PLACEMENT_POLICY,
        Action.DROP_PLACEMENT_POLICY,
        Action.PARTITION_PLACEMENT,
        Action.SCHEMA_PLACEMENT,
        Action.TABLE_PLACEMENT,
        Action.CACHE_TABLE,
        Action.TABLE_STATS_OPTIONS,
        Action.NO_CACHE_TABLE,
        Action.TTL_INFO,
        Action.TTL_REMOVE,
        Action.CREATE_RESOURCE_GROUP,
        Action.ALTER_RESOURCE_GROUP,
        Action.DROP_RESOURCE_GROUP,
    }
)

# RECOVER TABLE and FLASHBACK TABLE share an action. Each of them restores rows without writing them to a
# binlog.
ROWS_NOT_IN_BINLOGS = frozenset({Action.RECOVER_TABLE, Action.FLASHBACK_CLUSTER, Action.RECOVER_SCHEMA})


@dataclass(frozen=True)
class DdlJob:
    """A finished DDL job.

    `schema_version` is the version of the cluster's schema that the job produced; it is 0 for a job without
    effect (cancelled or rolled back). `finished_ts` is a timestamp of the cluster shortly after the commit of
    the job's DDL binlog. `tables` are the TableInfo objects after the change, and `database` is the DBInfo
    object.
    """

    job_id: int
    action: int
    schema_version: int
    schema_id: int
    table_id: int
    schema_name: str
    query: str
    finished_ts: int
    database: dict[str, Any] | None = None
    tables: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    # The session of the statement, None if TiDB did not record it.
    sql_mode: int | None = None
    time_zone: str | None = None

    @classmethod
    def parse(cls, content: bytes | str) -> Self:
        """Read a job's JSON as TiDB stores it. Raises EventMalformed."""
        try:
            values = json.loads(content)
            binlog = values.get("binlog") or {}
            several = binlog.get("MultipleTableInfos") or ()
            table = binlog.get("TableInfo")
            has_effect = int(values["state"]) in (_SYNCED, _DONE)
            session = values.get("reorg_meta") or {}
            return cls(
                job_id=int(values["id"]),
                action=int(values["type"]),
                schema_version=int(binlog.get("SchemaVersion") or 0) if has_effect else 0,
                schema_id=int(values["schema_id"]),
                table_id=int(values["table_id"]),
                schema_name=str(values.get("schema_name") or ""),
                query=str(values.get("query") or ""),
                finished_ts=int(binlog.get("FinishedTS") or 0),
                database=binlog.get("DBInfo"),
                tables=tuple(several) or ((table,) if table else ()),
                sql_mode=session.get("sql_mode"),
                time_zone=_zone_of_location(session.get("location")),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise EventMalformed(
                f"a DDL job of the cluster cannot be read: {problem!r} in {str(content[:200])!r}",
                hint="Report it with the version of TiDB",
            ) from problem

    def to_json(self) -> dict[str, Any]:
        """Return the job in the form of TiDB's JSON, with only the fields that Penstock needs."""
        return {
            "id": self.job_id,
            "type": self.action,
            "state": _SYNCED,
            "schema_id": self.schema_id,
            "table_id": self.table_id,
            "schema_name": self.schema_name,
            "query": self.query,
            "binlog": {
                "SchemaVersion": self.schema_version,
                "DBInfo": self.database,
                "TableInfo": self.tables[0] if len(self.tables) == 1 else None,
                "MultipleTableInfos": list(self.tables) if len(self.tables) > 1 else None,
                "FinishedTS": self.finished_ts,
            },
        }


def _zone_of_location(location: dict[str, Any] | None) -> str | None:
    """Return the time zone of a job's `location` as MySQL names it; None for a server's own, unnamed time
    zone.

    A session with a fixed offset is recorded as UTC with an offset in seconds.
    """
    if not location or location.get("name") in ("", "Local", "System"):
        return None
    offset = int(location.get("offset") or 0)
    return zone_of_offset(offset) if offset or location["name"] == "UTC" else str(location["name"])


def zone_of_offset(offset_s: int) -> str:
    """Return the name that MySQL gives to a time zone with a fixed offset, such as +08:00."""
    minutes = abs(offset_s) // 60
    return f"{'-' if offset_s < 0 else '+'}{minutes // 60:02d}:{minutes % 60:02d}"
