# SPDX-License-Identifier: Apache-2.0
"""The listeners: every port of the daemon, served in one event loop.

    http             the log's REST interface and changes      serve/http/
    canal            TCP, for Canal clients                    serve/canal/
    ptubes           HTTP, for Ptubes clients                  serve/ptubes/protocol.py
    ptubes_monitor   HTTP, for Ptubes monitors                 serve/ptubes/monitor.py

They share the accounts (`access`), the certificate, and the limits on connections.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Collection, Coroutine, Generator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.coordinate.store import CoordinationStore
from penstock.errors import PenstockError
from penstock.limits import (
    DRAIN_SECONDS_MAX,
    GREETING_SECONDS_MAX,
    HTTP_IDLE_SECONDS_MAX,
    REQUEST_HEAD_BYTES_MAX,
)
from penstock.serve.accepting import Address, ListeningSocket
from penstock.serve.access import Access
from penstock.serve.canal.listener import CanalListener, open_cursor_store
from penstock.serve.canal.protocol import CanalServer
from penstock.serve.connections import BoundedHttp, Connections, Traffic, bounded_http, sending_files
from penstock.serve.guard import Guard, Measured
from penstock.serve.http import (
    as_of,
    changes,
    copies,
    definitions,
    fleet,
    history,
    holds,
    log_export,
    segments,
    transactions,
    verification,
)
from penstock.serve.http import log as http
from penstock.serve.ports import Ports
from penstock.serve.problems import as_http_problem, as_problem
from penstock.serve.ptubes.heads import RequestHeads
from penstock.serve.ptubes.monitor import monitor_app
from penstock.serve.ptubes.protocol import ptubes_app
from penstock.serve.served import Served
from penstock.serve.telemetry import Telemetry
from penstock.settings.daemon import Listening, ListenSettings

_log = structlog.get_logger(__name__)


def make_app(served: Served, listeners: Mapping[str, str], more: Sequence[Route] = ()) -> Starlette:
    """Return the application of the HTTP port. `listeners` maps each listener to its address."""

    async def where(request: Request) -> Response:
        return JSONResponse({"listeners": dict(listeners)})

    return Starlette(
        routes=[
            *http.routes(served),
            *changes.routes(served),
            *holds.routes(served),
            *copies.routes(served),
            *history.routes(served),
            *transactions.routes(served),
            *as_of.routes(served),
            *segments.routes(served),
            *log_export.routes(served),
            *definitions.routes(served),
            *verification.routes(served),
            Route("/v1/listeners", where, name="_listeners"),
            *more,
        ],
        exception_handlers={PenstockError: as_problem, HTTPException: as_http_problem},
    )


def make_readers_app(served: Served) -> Starlette:
    """Return the application of a process that serves followers and readers of raw bytes only."""
    return Starlette(
        routes=[*changes.routes(served), *http.routes(served)],
        exception_handlers={PenstockError: as_problem, HTTPException: as_http_problem},
    )


class HttpListener(uvicorn.Server):
    """One HTTP port in a shared event loop. `app` authenticates the clients."""

    def __init__(
        self,
        name: Listening,
        app: ASGIApp,
        settings: ListenSettings,
        connections: Connections,
        port: socket.socket | None = None,
    ) -> None:
        """Without a port, connections arrive through `serve_accepted` only."""
        self._listening = [] if port is None else [port]
        super().__init__(
            uvicorn.Config(
                sending_files(app),
                log_config=None,
                access_log=False,
                lifespan="off",
                loop="penstock.serve.precise_loop:new_loop",
                http=bounded_http(connections, name, RequestHeads if name == "ptubes" else None),
                ws="none",
                server_header=False,
                # Trust the connection's address only; proxy headers can be forged.
                proxy_headers=False,
                ssl_certfile=str(settings.tls.cert) if settings.tls else None,
                ssl_keyfile=str(settings.tls.key) if settings.tls else None,
                timeout_keep_alive=int(HTTP_IDLE_SECONDS_MAX),
                timeout_graceful_shutdown=int(DRAIN_SECONDS_MAX),
                h11_max_incomplete_event_size=REQUEST_HEAD_BYTES_MAX,
            )
        )

    async def start(self) -> None:
        """Start serving, for a listener that runs in another listener's loop."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(self._listening)

    async def stop_serving(self) -> None:
        """Stop accepting requests, finish the requests in progress, then end."""
        if self.started:
            await self.shutdown(self._listening)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections like uvicorn, but with a limit on the TLS handshake."""
        config, loop = self.config, asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                self.make_protocol,
                sock=listening,
                ssl=config.ssl,
                ssl_handshake_timeout=GREETING_SECONDS_MAX if config.ssl else None,
                backlog=config.backlog,
            )
            for listening in sockets or ()
        ]
        self.started = True

    def make_protocol(self, forwarded_for: Address | None = None) -> asyncio.Protocol:
        """Return the protocol of a new connection, which may carry a request forwarded for a remote
        client.
        """
        config = self.config
        protocol: BoundedHttp = config.http_protocol_class(  # type: ignore[call-arg, assignment]
            config=config, server_state=self.server_state, app_state=self.lifespan.state
        )
        protocol.forwarded_for = forwarded_for
        return protocol

    async def serve_accepted(
        self, accepted: socket.socket, forwarded_for: Address | None = None, *, over_tls: bool
    ) -> None:
        """Serve a connection that was accepted elsewhere; return after its handshake. Raises OSError."""
        tls = self.config.ssl if over_tls else None
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                partial(self.make_protocol, forwarded_for),
                accepted,
                ssl=tls,
                ssl_handshake_timeout=GREETING_SECONDS_MAX if tls else None,
            )
        except BaseException:
            accepted.close()
            raise

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the daemon."""
        yield


def guarded(
    name: Listening, app: ASGIApp, access: Access, settings: ListenSettings, traffic: Traffic
) -> ASGIApp:
    """Return an application whose clients have to authenticate."""
    # Ptubes clients understand no status but 200, so their application does its own authentication.
    return app if name == "ptubes" else Guard(app, access, name, settings.addresses()[name][0], traffic)


def ptubes_listener(
    served: Served,
    access: Access,
    settings: ListenSettings,
    connections: Connections,
    port: socket.socket | None = None,
) -> HttpListener:
    """Return the listener for Ptubes clients."""
    app, traffic = ptubes_app(served, access, settings.ptubes_zone_seconds), connections.traffic
    guard = guarded("ptubes", app, access, settings, traffic)
    return HttpListener("ptubes", Measured(guard, "ptubes", traffic), settings, connections, port)


class Handover(Protocol):
    """Hands connections to the daemon's ports over to other processes of the daemon."""

    @property
    def listeners(self) -> Collection[Listening]:
        """The listeners whose connections other processes serve. Listeners that the daemon does not have are
        left out.
        """

    def begin(
        self,
        ports: Mapping[Listening, ListeningSocket],
        serve_here: Callable[[socket.socket, Address], Coroutine[Any, Any, None]],
        report_accepting: Callable[[Listening, bool], None],
    ) -> None:
        """Begin to hand over connections. Called in the event loop.

        `serve_here` serves a connection over which one of the processes forwards an HTTP request; its second
        argument is the client's address. `report_accepting` is called when connections of a listener start or
        stop being accepted.
        """

    async def end(self) -> None:
        """Stop accepting connections, and wait until the processes have finished their requests."""


class Listener(HttpListener):
    """Serves every port until it is stopped.

    `serve_until_stopped` must be called from the main thread. `stop` may be called from any thread and from
    signal handlers.
    """

    def __init__(
        self,
        settings: ListenSettings,
        served: Served,
        access: Access,
        ports: Ports,
        open_store: Callable[[], CoordinationStore] | None = None,
        telemetry: Telemetry | None = None,
        fleet_status: Callable[[], Mapping[str, Any]] | None = None,
        more_routes: Sequence[Route] = (),
        handover: Handover | None = None,
    ) -> None:
        """`open_store` opens the store of the Canal clients' cursors; only Canal clients wait for it.

        `fleet_status` returns the state of the fleet, or None if the daemon is not in a fleet. The call may
        block. `more_routes` are further routes of the HTTP port that need the daemon's state. With
        `handover`, other processes serve the HTTP port and some other ports.
        """
        self._served = served
        self._ports = ports
        self._connections = ports.connections
        self._settings = settings
        self._access = access
        self._open_store = open_store
        self._store: CoordinationStore | None = None
        self._other_listeners: list[HttpListener | CanalListener] = []
        self._opening: asyncio.Task[None] | None = None
        self._holding: asyncio.Task[None] | None = None
        self._telemetry = telemetry or Telemetry(served, ports)
        self._reporting: asyncio.Task[None] | None = None
        self._handover = handover
        self._elsewhere = frozenset[Listening]() if handover is None else frozenset(handover.listeners)
        app = make_app(
            served,
            ports.addresses(),
            [
                *self._telemetry.routes(),
                *fleet.routes(fleet_status, served.threads.reporting),
                *more_routes,
            ],
        )
        traffic = self._connections.traffic
        guard = guarded("http", app, access, settings, traffic)
        super().__init__(
            "http",
            # The process that forwards a request measures its duration.
            Measured(guard, "http", traffic) if handover is None else guard,
            settings,
            self._connections,
            ports.sockets["http"],
        )

    @property
    def address(self) -> str:
        """The HTTP address: host:port, with the port that the system chose."""
        return self._ports.address("http")

    def serve_until_stopped(self) -> None:
        """Serve requests until `stop`."""
        self.run(sockets=[self._ports.sockets["http"]] if self._handover is None else [])

    def stop(self) -> None:
        """Stop accepting requests, finish the requests in progress, then end."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on every port."""
        await super().startup(sockets)
        if self._handover is not None:
            ports = {name: port for name, port in self._ports.sockets.items() if name in self._elsewhere}
            serve_here = partial(self.serve_accepted, over_tls=False)
            self._handover.begin(ports, serve_here, self._note_accepting)
        others = self._ports.sockets.keys() - self._elsewhere - {"http", "canal"}
        self._other_listeners = [self._http(name) for name in others]
        for listener in self._other_listeners:
            await listener.start()
        later = self._elsewhere | {"canal"}
        self._telemetry.health.listening.update(self._ports.sockets.keys() - later)
        self._holding = asyncio.create_task(self._served.consumers.run())
        self._reporting = asyncio.create_task(self._telemetry.run())
        if "canal" in self._ports.sockets and "canal" not in self._elsewhere:
            self._opening = asyncio.create_task(self._start_canal())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wake waiting requests so that they end, then shut all ports down concurrently."""
        self._served.arrivals.close()
        if self._handover is not None:
            await self._handover.end()
        if self._opening is not None:
            self._opening.cancel()
        if self._reporting is not None:
            self._reporting.cancel()
        ending = [listener.stop_serving() for listener in self._other_listeners]
        await asyncio.gather(super().shutdown(sockets), *ending)
        self._ports.close()
        if self._holding is not None:
            self._holding.cancel()
            await self._served.consumers.write()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
        await asyncio.to_thread(self._telemetry.close)

    def _note_accepting(self, name: Listening, accepting: bool) -> None:
        if accepting:
            self._telemetry.health.listening.add(name)
        else:
            self._telemetry.health.listening.discard(name)

    async def _start_canal(self) -> None:
        """Accept Canal clients once the store that holds their cursors answers; until then the clients
        wait.
        """
        assert self._open_store is not None, "the daemon names it where it listens for Canal"
        self._store = await open_cursor_store(self._open_store)
        if self._store is None:
            return
        server = CanalServer(self._served, self._access, self._store, self._settings)
        # The TLS context, if there is one, has been loaded before this point.
        canal = CanalListener(server.serve, self._connections, self.config.ssl, self._ports.sockets["canal"])
        await canal.start()
        self._telemetry.health.listening.add("canal")
        self._other_listeners.append(canal)

    def _http(self, name: Listening) -> HttpListener:
        port = self._ports.sockets[name]
        if name == "ptubes":
            return ptubes_listener(self._served, self._access, self._settings, self._connections, port)
        traffic = self._connections.traffic
        guard = guarded(name, monitor_app(self._served), self._access, self._settings, traffic)
        return HttpListener(name, Measured(guard, name, traffic), self._settings, self._connections, port)
