# SPDX-License-Identifier: Apache-2.0
"""The code shared by all sinks that keep a client connected to the target's server."""

from abc import abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from penstock.model import Secret
from penstock.sinks.endpoint import Endpoint
from penstock.sinks.sink import Sink


class Client(Protocol):
    """A client connected to a server."""

    def close(self) -> None:
        """Close the client's connections."""


ClientT = TypeVar("ClientT", bound=Client)


class ClientSink(Sink, Generic[ClientT]):
    """A sink with a client, which is not pickled with it."""

    def __init__(self, settings: Endpoint) -> None:
        self.settings = settings
        self.password: Secret | None = settings.secret()
        self._client: ClientT | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None}

    @property
    def client(self) -> ClientT:
        """A client that stays open until `close`. Raises OptionInvalid, DependencyMissing."""
        if self._client is None:
            self._client = self.connect()
        return self._client

    @abstractmethod
    def connect(self) -> ClientT:
        """Return a new client. Raises OptionInvalid, DependencyMissing."""

    def writers_client(self) -> ClientT:
        """Return the client for a writer: the sink's if it has one, because many small batches can share its
        connections."""
        return self._client or self.connect()

    def release(self, client: ClientT) -> None:
        """Close a writer's client unless it is the sink's own."""
        if client is not self._client:
            client.close()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
