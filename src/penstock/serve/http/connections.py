# SPDX-License-Identifier: Apache-2.0
"""The connections of every listener over HTTP: `GET /v1/connections`, for full administrators."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.serve.access import account_of
from penstock.serve.ports import Ports
from penstock.serve.served import Served

_CONNECTIONS_SHOWN_MAX = 1000


def routes(served: Served, ports: Ports) -> list[Route]:
    """Return the route of connections."""

    async def connections(request: Request) -> Response:
        account_of(request).prove_administers_all(served.instances, "the connections")
        traffic = ports.connections.traffic
        listeners = [
            {
                "listener": name,
                "address": ports.address(name),
                "open": ports.connections.count(name),
                "requests": _counts(traffic.requests.counts(), name),
                "rejected": _counts(traffic.rejected.counts(), name),
            }
            for name in ports.sockets
        ]
        shown = ports.connections.oldest(_CONNECTIONS_SHOWN_MAX)
        fields = ("listener", "peer", "port", "since_us")
        return JSONResponse(
            {
                "listeners": listeners,
                "connections": [{field: getattr(known, field) for field in fields} for known in shown],
            }
        )

    return [Route("/v1/connections", connections, methods=["GET"], name="_connections")]


def _counts(counts: dict[tuple[str, ...], float], listener: str) -> dict[str, int]:
    """Return the counts of a listener, by status or by reason."""
    return {labels[1]: int(count) for labels, count in counts.items() if labels[0] == listener}
