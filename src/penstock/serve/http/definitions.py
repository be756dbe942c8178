# SPDX-License-Identifier: Apache-2.0
"""The definitions that a log keeps, over HTTP: `GET /v1/instances/{instance}/definitions`.

With a table, each of its definitions; without, the names of the tables.
"""

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.capture.kept_schemas import DefinitionVersion, defined_tables, definition_versions
from penstock.logstore.followed_log import ServedLog
from penstock.model import TableName
from penstock.serve.access import account_of
from penstock.serve.http.query import Query, log_of
from penstock.serve.masking import Masking
from penstock.serve.served import Served
from penstock.serve.threads import run_in


def routes(served: Served) -> list[Route]:
    """Return the route of definitions."""
    path = "/v1/instances/{instance}/definitions"
    return [Route(path, functools.partial(_definitions, served), methods=["GET"], name="_definitions")]


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
    # A statement may name further tables, and quote a masked value.
    sees_statements = account.readable(instance).selects_all and not account.masking
    return JSONResponse(
        {
            "table": str(name),
            "versions": [_shown(version, sees_statements=sees_statements) for version in versions],
        }
    )


def _shown(version: DefinitionVersion, *, sees_statements: bool) -> dict[str, Any]:
    schema = version.schema
    columns = [] if schema is None else schema.columns
    return {
        "since": None if version.since is None else str(version.since),
        "dropped": schema is None,
        "statement": version.statement if sees_statements else None,
        "columns": [
            {
                "name": column.name,
                "type": column.type_text,
                "charset": column.charset,
                "nullable": column.nullable,
            }
            for column in columns
        ],
        "primary_key": [] if schema is None else list(schema.primary_key),
    }


def columns_of_definitions(log: ServedLog, name: TableName, masking: Masking) -> list[list[str]]:
    """Return the columns of each definition of a table; none if no column of it is masked."""
    if not masking.columns(name):
        return []
    versions = definition_versions(log, name)
    return [[column.name for column in version.schema.columns] for version in versions if version.schema]
