# SPDX-License-Identifier: Apache-2.0
"""One transaction over HTTP: `GET /v1/instances/{instance}/transaction`, by GTID or position.

An account sees the rows of the tables that it may read, and the total number of rows.
"""

import functools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import OptionInvalid
from penstock.limits import MIB
from penstock.logstore.followed_log import ServedLog
from penstock.model import Position, TableName, TablePatterns
from penstock.serve.access import Account, account_of
from penstock.serve.http.answers import ending_on_disconnect
from penstock.serve.http.holds import visible_holds
from penstock.serve.http.query import Query, log_of
from penstock.serve.masking import MaskedColumns, hiding_texts, mask_part
from penstock.serve.own_log import OwnSource
from penstock.serve.served import Served
from penstock.source.row_history import TableStatement, part_to_json
from penstock.source.transaction import (
    FoundTransaction,
    TableChange,
    changes_of,
    find_at,
    find_by_gtid,
)

_ROWS_DEFAULT = 200
# A response is built in memory, so its rows and their texts are limited.
_ROWS_MAX = 5000
_TEXT_BYTES_MAX = 8 * MIB

_Part = TableChange | TableStatement


def routes(served: Served) -> list[Route]:
    """Return the route of transactions."""
    path = "/v1/instances/{instance}/transaction"
    handler = ending_on_disconnect(functools.partial(_transaction, served))
    return [Route(path, handler, methods=["GET"], name="_transaction")]


async def _transaction(served: Served, request: Request) -> Response:
    log, query = log_of(served, request), Query(request)
    if query.has("gtid") == query.has("position"):
        raise OptionInvalid("name one of gtid and position", hint="transaction?gtid=0-1-5")
    instance, account = request.path_params["instance"], account_of(request)
    tables = account.readable(instance)
    account.prove_reads_every_row("transactions")
    limit = min(query.number("limit", _ROWS_DEFAULT), _ROWS_MAX)
    gtid, position = (query.text("gtid"), None) if query.has("gtid") else (None, query.position("position"))
    read = functools.partial(_read, log, instance, account, tables, limit)
    return JSONResponse(await served.threads.search(read, gtid, position))


def _read(
    log: ServedLog,
    instance: str,
    account: Account,
    tables: TablePatterns,
    limit: int,
    gtid: str | None,
    position: Position | None,
) -> dict[str, Any]:
    """Return a transaction with its first rows, in commit order. Runs in a thread."""
    with closing(OwnSource(instance, log)) as source:
        if gtid is not None:
            transaction = find_by_gtid(log, source, gtid)
        else:
            assert position is not None, "one of them is given"
            transaction = find_at(log, source, position)
        with hiding_texts(hides=not account.sees_whole_rows):
            parts, has_more = _first(changes_of(source, transaction, tables), limit)
    changes = sorted((part for part in parts if isinstance(part, TableChange)), key=lambda change: change.row)
    statements = [part for part in parts if isinstance(part, TableStatement)]
    readers = visible_holds(account, log)
    return {
        "transaction": _shown(transaction, sees_all=tables.selects_all and account.sees_whole_rows),
        "changes": [_change_to_json(account, change) for change in changes],
        "statements": [
            mask_part(part_to_json(statement), account.masking.all_columns) for statement in statements
        ],
        "more": has_more,
        "readers": [{"reader": reader.name, "position": str(reader.position)} for reader in readers],
        "pending": [reader.name for reader in readers if reader.position < transaction.end],
    }


def _change_to_json(account: Account, change: TableChange) -> dict[str, Any]:
    table = TableName.parse(change.table)
    hidden = frozenset(name.casefold() for name in account.masking.hidden_among(table, change.columns))
    masked = account.masking.columns(table) | MaskedColumns(hidden)
    return {"table": change.table, "row": change.row, **mask_part(part_to_json(change.change), masked)}


def _first(parts: Iterator[_Part], limit: int) -> tuple[list[_Part], bool]:
    """Return the first parts of a transaction, and whether there are more."""
    first: list[_Part] = []
    size = 0
    for part in parts:
        if len(first) >= limit or size > _TEXT_BYTES_MAX:
            return first, True
        first.append(part)
        size += _text_bytes(part)
    return first, False


def _text_bytes(part: _Part) -> int:
    if isinstance(part, TableStatement):
        return len(part.text)
    images = (part.change.before or {}, part.change.after or {})
    return sum(len(value) for image in images for value in image.values() if isinstance(value, str | bytes))


def _shown(transaction: FoundTransaction, *, sees_all: bool) -> dict[str, Any]:
    shown = {
        **asdict(transaction),
        "start": str(transaction.start),
        "end": str(transaction.end),
        "bytes": transaction.end.offset - transaction.start.offset,
    }
    if not sees_all:
        # The table names and the statement may reveal tables that the account may not read.
        shown |= {"tables": None, "statement": None}
    return shown
