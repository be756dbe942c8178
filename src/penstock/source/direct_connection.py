# SPDX-License-Identifier: Apache-2.0
"""A connection for many small requests to one daemon, one after another.

At the head of a log, a batch has a few transactions, and urllib3 takes more than twice as long for a request
as the standard library. This connection understands only a successful, complete response with a length. For
everything else the caller sends the request again with urllib3, which reports what is wrong.
"""

import http.client
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit


@dataclass(frozen=True)
class DirectResponse:
    """A successful response: its headers by lower-case name, and its body, None if it was too long."""

    headers: Mapping[str, str]
    content: bytes | None


class DirectConnection:
    """An open connection to the daemon at a URL. For one thread at a time."""

    def __init__(self, connection: http.client.HTTPConnection, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self._connection = connection
        self._headers = dict(headers)

    @classmethod
    def open(cls, url: str, tls: ssl.SSLContext | None, headers: Mapping[str, str], seconds: float) -> Self:
        """Connect to a daemon's base URL. Raises OSError."""
        address = urlsplit(url)
        assert address.hostname is not None, "a base URL names a host"
        if tls is None:
            connection = http.client.HTTPConnection(address.hostname, address.port, timeout=seconds)
        else:
            connection = http.client.HTTPSConnection(
                address.hostname, address.port, timeout=seconds, context=tls
            )
        connection.connect()
        # A lost connection must be reported, not opened again.
        connection.auto_open = 0
        return cls(connection, url, headers)

    def get(self, path: str, seconds: float, bytes_max: int) -> DirectResponse | None:
        """Return the response to a GET request, None if it is not successful, complete, and short enough.

        Only after a response can the connection be used again. A daemon that sends nothing for `seconds`
        raises TimeoutError, and a lost connection OSError.
        """
        stream: socket.socket = self._connection.sock
        stream.settimeout(seconds)
        try:
            self._connection.request("GET", path, headers=self._headers)
            response = self._connection.getresponse()
            if response.status != http.client.OK or response.length is None or response.will_close:
                return None
            if response.length > bytes_max:
                return None
            content = response.read()
        except http.client.RemoteDisconnected:
            raise
        except http.client.HTTPException:
            return None
        return DirectResponse({name.lower(): value for name, value in response.getheaders()}, content)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
