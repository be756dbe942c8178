# SPDX-License-Identifier: Apache-2.0
"""Repairs HTTP requests from Ptubes clients, which omit the Host header that HTTP/1.1 requires."""

import re

from penstock.limits import REQUEST_HEAD_BYTES_MAX

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,18})[ \t]*\r\n")

# Browsers always send a Host header, so a request without one does not come from a web page.
_HOST = b"Host: localhost\r\n"


class RequestHeads:
    """Adds a Host header to each request of one connection that has none. All other bytes are unchanged."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._body_left = 0
        self._as_it_comes = False

    def feed(self, data: bytes) -> bytes:
        """Accept received bytes, and return those that can be parsed now; an incomplete head is held back."""
        out = bytearray()
        while data:
            if self._as_it_comes:
                out += data
                break
            if self._body_left:
                body, data = data[: self._body_left], data[self._body_left :]
                self._body_left -= len(body)
                out += body
                continue
            searched = max(len(self._head) - len(_HEAD_END), 0)
            self._head += data
            end = self._head.find(_HEAD_END, searched)
            if end < 0:
                # Leave a head that is too long to the HTTP parser, which rejects it.
                if len(self._head) > REQUEST_HEAD_BYTES_MAX:
                    self._as_it_comes = True
                    out += self._head
                    self._head.clear()
                break
            data = bytes(self._head[end + len(_HEAD_END) :])
            out += self._add_host(bytes(self._head[: end + len(_HEAD_END)]))
            self._head.clear()
        return bytes(out)

    def _add_host(self, head: bytes) -> bytes:
        """Return a complete head with a Host header, and record the length of its body."""
        lowered = head.lower()
        length = _LENGTH.search(lowered)
        self._body_left = int(length.group(1)) if length else 0
        # Ptubes clients send no chunked requests, so a chunked request already has a Host header.
        self._as_it_comes = b"\r\ntransfer-encoding:" in lowered
        if b"\r\nhost:" in lowered:
            return head
        line_end = head.find(b"\r\n") + 2
        return head[:line_end] + _HOST + head[line_end:]
