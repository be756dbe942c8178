# SPDX-License-Identifier: Apache-2.0
"""The account of a client over HTTP: `GET /v1/account` returns its name and its rights."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.serve.access import account_of


def routes() -> list[Route]:
    """Return the route of the account."""
    return [Route("/v1/account", _account, methods=["GET"], name="_account")]


async def _account(request: Request) -> Response:
    account = account_of(request)
    return JSONResponse(
        {
            "account": account.name,
            "admin": account.admin,
            "metrics": account.may_read_metrics(),
            "instances": list(account.instances),
            "subscriptions": list(account.subscriptions),
            "tables": list(account.tables.include),
            "exclude_tables": list(account.tables.exclude),
            "masked": {pattern: list(names) for pattern, names in account.masking.settings.items()},
            "columns": {pattern: list(names) for pattern, names in account.masking.shown_settings.items()},
            # Report only the table patterns: the conditions themselves would reveal values of hidden rows.
            "where": list(account.row_conditions.patterns),
        }
    )
