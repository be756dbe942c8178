# SPDX-License-Identifier: Apache-2.0
"""Table definitions stored with a log, over HTTP.

    GET  /v1/instances/{instance}/definitions    each definition of a table, or the names of all tables
    POST /v1/instances/{instance}/definitions    {"table": "shop.t", "position": ..., "create_table": ...}

POST sets the definition of a table from a position on, up to the next DDL on it, for administrators. With
`dry_run`, the default, it only reports the table's current columns at the position and the new columns.
"""

import functools
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.capture.kept_schemas import (
    DefinitionVersion,
    defined_tables,
    definition_by_sql,
    definition_versions,
    give_definition,
)
from penstock.logstore.followed_log import ServedLog
from penstock.model import Position, TableName, TableSchema
from penstock.serve.access import account_of
from penstock.serve.http.audit import record_action
from penstock.serve.http.json_request import ChangeRequest
from penstock.serve.http.query import Query, log_of
from penstock.serve.masking import Masking
from penstock.serve.served import Served
from penstock.serve.threads import run_in

_STATEMENT_CHARACTERS_MAX = 1 << 20


class DefinitionRequest(ChangeRequest):
    """A request to set the definition of a table, as an operator supplies it."""

    table: str = Field(description="The table: shop.orders")
    position: str = Field(description="The position from which the definition applies")
    create_table: str = Field(
        max_length=_STATEMENT_CHARACTERS_MAX, description="The CREATE TABLE of the table at that position"
    )


def routes(served: Served) -> list[Route]:
    """Return the routes of table definitions."""
    path = "/v1/instances/{instance}/definitions"
    return [
        Route(path, functools.partial(_definitions, served), methods=["GET"], name="_definitions"),
        Route(path, functools.partial(_define, served), methods=["POST"], name="_define"),
    ]


async def _definitions(served: Served, request: Request) -> Response:
    log, query = log_of(served, request), Query(request)
    account, instance = account_of(request), request.path_params["instance"]
    if not query.has("table"):
        names = await run_in(served.threads.definitions, defined_tables, log)
        readable = [str(name) for name in names if account.may_read_table(name.database, name.table)]
        return JSONResponse({"tables": readable})
    name = TableName.parse(query.text("table"))
    account.prove_reads_table(instance, name)
    versions = await run_in(served.threads.definitions, definition_versions, log, name)
    # A statement may name other tables and contain hidden values, so only accounts that see everything get
    # it.
    sees_statements = account.readable(instance).selects_all and account.sees_whole_rows
    return JSONResponse(
        {
            "table": str(name),
            "versions": [_shown(version, sees_statements=sees_statements) for version in versions],
        }
    )


async def _define(served: Served, request: Request) -> Response:
    account, instance = account_of(request), request.path_params["instance"]
    account.prove_defines(instance)
    wanted = await DefinitionRequest.read(
        request,
        '{"table": "shop.t", "position": "mysql-bin.000003:1542", "create_table": "CREATE TABLE t ..."}',
    )
    log, name = log_of(served, request), TableName.parse(wanted.table)
    account.prove_reads_table(instance, name)
    position = Position.parse(wanted.position)
    threads = served.threads.definitions
    before, definition = await run_in(threads, definition_by_sql, log, name, position, wanted.create_table)
    if not wanted.dry_run:
        await run_in(threads, give_definition, log, name, position, definition.to_json())
        record_action(account, "set definition", instance=instance, table=str(name), position=str(position))
    return JSONResponse(
        {
            "table": str(name),
            "position": str(position),
            "before": None if before is None else _columns(before),
            "after": _columns(definition.schema),
            "dry_run": wanted.dry_run,
        }
    )


def _columns(schema: TableSchema) -> list[dict[str, Any]]:
    return [
        {
            "name": column.name,
            "type": column.type_text,
            "charset": column.charset,
            "nullable": column.nullable,
        }
        for column in schema.columns
    ]


def _shown(version: DefinitionVersion, *, sees_statements: bool) -> dict[str, Any]:
    schema = version.schema
    return {
        "since": None if version.since is None else str(version.since),
        "dropped": schema is None,
        "statement": version.statement if sees_statements else None,
        "columns": [] if schema is None else _columns(schema),
        "primary_key": [] if schema is None else list(schema.primary_key),
    }


def columns_of_definitions(log: ServedLog, name: TableName, masking: Masking) -> list[list[str]]:
    """Return the columns of each definition of a table, or nothing if no column of the table is masked."""
    if not masking.columns(name):
        return []
    versions = definition_versions(log, name)
    return [[column.name for column in version.schema.columns] for version in versions if version.schema]
