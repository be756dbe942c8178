# SPDX-License-Identifier: Apache-2.0
"""The port of a drainer: Notify for Pumps, and the HTTP calls of binlogctl and operators."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import unquote

import grpc

from penstock.errors import PenstockError
from penstock.tidb.grpc_server import CallRefused, GrpcCall
from penstock.tidb.messages import NOTIFY
from penstock.tidb.registry import NodeState

_NOTIFY_RESPONSE = b""
_STATES = {"pause": NodeState.PAUSED, "close": NodeState.OFFLINE}
# The codes of binlogctl's answers.
_OK, _WRONG, _NOT_FOUND = 200, 1, 2


class ServedDrainer(Protocol):
    """A drainer as its port uses it: the values to show, and the requests that it accepts."""

    @property
    def node_id(self) -> str:
        """The drainer's name in the registry."""

    def refresh_pumps(self) -> None:
        """Read the Pumps that are registered now. Raises ConnectionLost, AccessDenied."""

    def status_values(self) -> dict[str, Any]:
        """Return the JSON object of the status."""

    def durable_ts(self) -> int:
        """Return the commit timestamp up to which everything is durable."""

    def request_state(self, state: NodeState) -> None:
        """End the drainer, and leave it registered in this state."""


class DrainerService:
    """Answers the gRPC calls of a drainer. Created in the event loop that serves them."""

    def __init__(self, drainer: ServedDrainer, loop: asyncio.AbstractEventLoop) -> None:
        self._drainer = drainer
        self._loop = loop

    def receive(self, calls: Sequence[GrpcCall]) -> None:
        """Begin to answer calls that arrived together."""
        for call in calls:
            if call.method == NOTIFY:
                call.run(self._notify(call))
            else:
                call.refuse(grpc.StatusCode.UNIMPLEMENTED, f"a Drainer has no method {call.method}")

    async def _notify(self, call: GrpcCall) -> None:
        """Answer once the announcing Pump is in the merge. The Pump accepts transactions only after that."""
        try:
            await self._loop.run_in_executor(None, self._drainer.refresh_pumps)
        except PenstockError as problem:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, str(problem)) from problem
        call.peer.answer([call.stream], _NOTIFY_RESPONSE)


def answers_of(drainer: ServedDrainer) -> Callable[[str, str], Any]:
    """Return the handler of HTTP requests, with the paths and answers of the original Drainer."""

    async def answer(method: str, path: str) -> Any:
        parts = [unquote(part) for part in path.partition("?")[0].strip("/").split("/")]
        if method == "GET" and parts == ["status"]:
            return drainer.status_values()
        if method == "GET" and parts == ["commit_ts"]:
            return _envelope("success", _OK, {"ts": drainer.durable_ts()})
        if method == "PUT" and len(parts) == 3 and parts[0] == "state":
            return _change_state(drainer, parts[1], parts[2])
        return None

    return answer


def _change_state(drainer: ServedDrainer, node_id: str, action: str) -> dict[str, Any]:
    if node_id != drainer.node_id:
        return _envelope(f"invalid nodeID {node_id}, this is {drainer.node_id}", _NOT_FOUND)
    if action not in _STATES:
        return _envelope(f"invalid action {action}", _WRONG)
    drainer.request_state(_STATES[action])
    return _envelope(f"{action} drainer {node_id} success", _OK)


def _envelope(message: str, code: int, data: Any = None) -> dict[str, Any]:
    return {"message": message, "code": code, "data": data}
