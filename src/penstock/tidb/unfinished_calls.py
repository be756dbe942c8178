# SPDX-License-Identifier: Apache-2.0
"""How much of calls that have not arrived whole a gRPC client has sent, by the frames of HTTP/2 (RFC 9113).

gRPC keeps the message of a call in memory until it is whole. It limits the number of calls and the size of a
message, but not what all calls have together.
"""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_HEADER_BYTES = 9
_DATA, _HEADERS, _RESET = 0, 1, 3
_END_STREAM = 0x1


class UnfinishedCalls:
    """Follows what a client sends over one connection, from the preface on."""

    def __init__(self) -> None:
        # The message bytes of all calls whose end did not arrive.
        self.bytes = 0
        self._bytes_by_stream: dict[int, int] = {}
        self._header = bytearray()
        # Bytes until the next frame.
        self._skipped = len(PREFACE)

    def follow(self, data: bytes) -> None:
        """Count the next bytes, which may begin and end anywhere in a frame."""
        position = 0
        while position < len(data):
            if self._skipped:
                step = min(self._skipped, len(data) - position)
                self._skipped -= step
                position += step
                continue
            part = data[position : position + _HEADER_BYTES - len(self._header)]
            self._header += part
            position += len(part)
            if len(self._header) == _HEADER_BYTES:
                self._begin_frame(bytes(self._header))
                self._header.clear()

    def _begin_frame(self, header: bytes) -> None:
        length, kind, flags = int.from_bytes(header[:3]), header[3], header[4]
        stream = int.from_bytes(header[5:]) & 0x7FFFFFFF
        self._skipped = length
        if kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self.bytes -= self._bytes_by_stream.pop(stream, 0)
        elif kind == _DATA:
            self.bytes += length
            self._bytes_by_stream[stream] = self._bytes_by_stream.get(stream, 0) + length
