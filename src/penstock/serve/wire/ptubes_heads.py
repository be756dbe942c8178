# SPDX-License-Identifier: Apache-2.0
"""HTTP as Ptubes' clients speak it: their requests name no host, which HTTP/1.1 asks of every one."""

import re

from penstock.limits import REQUEST_HEAD_BYTES_MAX

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,18})[ \t]*\r\n")

# A page in somebody's browser always names its host, so who names none is no such page.
_HOST = b"Host: localhost\r\n"


class RequestHeads:
    """Gives every request of one connection a Host, where it has none. Everything else stays as it came."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._body_left = 0
        self._as_it_comes = False

    def feed(self, data: bytes) -> bytes:
        """Take what came, and return what may be read by now; of a head, nothing before it is whole."""
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
                # A head that is too long is for the reader to refuse.
                if len(self._head) > REQUEST_HEAD_BYTES_MAX:
                    self._as_it_comes = True
                    out += self._head
                    self._head.clear()
                break
            data = bytes(self._head[end + len(_HEAD_END) :])
            out += self._named(bytes(self._head[: end + len(_HEAD_END)]))
            self._head.clear()
        return bytes(out)

    def _named(self, head: bytes) -> bytes:
        """Return a whole head with a Host, and note how long its body is."""
        lowered = head.lower()
        length = _LENGTH.search(lowered)
        self._body_left = int(length.group(1)) if length else 0
        # What ends otherwise than by its length comes from no client of Ptubes, and has its Host.
        self._as_it_comes = b"\r\ntransfer-encoding:" in lowered
        if b"\r\nhost:" in lowered:
            return head
        line_end = head.find(b"\r\n") + 2
        return head[:line_end] + _HOST + head[line_end:]
