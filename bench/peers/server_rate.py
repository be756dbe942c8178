# SPDX-License-Identifier: Apache-2.0
"""The server's own sending rate: a bare socket that requests the file and discards every byte."""

import socket
import struct

import pymysql
from pymysql.constants import COMMAND

from bench.corpora.corpus import FILE_NAME
from tools.servers.packages import install

from .peer import Job, Tally

TITLE = "server's sending rate"
BUFFER_BYTES = 1 << 20
_DUMP_NON_BLOCK = 1
_SERVER_ID = 4291


def version() -> str:
    """Return the version of the server."""
    return install("mysql").version


def receive_raw(job: Job) -> Tally:
    """Read the stream to its end and discard it. The end is the EOF packet of a non-blocking dump."""
    connection = pymysql.connect(host="127.0.0.1", port=job.port or 0, user="root", ssl_disabled=True)
    with connection, connection.cursor() as cursor:
        cursor.execute("SET @source_binlog_checksum = 'CRC32', @master_binlog_checksum = 'CRC32'")
        request = struct.pack("<IHI", 4, _DUMP_NON_BLOCK, _SERVER_ID) + FILE_NAME.encode()
        connection._execute_command(COMMAND.COM_BINLOG_DUMP, request)
        received = _discard(connection._sock)
    note = f"{received / 1e6:.0f} MB on the wire"
    if received < job.corpus.bytes:
        raise AssertionError(f"the stream ended after {received} bytes of {job.corpus.bytes}")
    return Tally(job.corpus.rows, job.corpus.bytes, note=note)


def _discard(channel: socket.socket) -> int:
    """Receive until the last bytes are an EOF packet (length 5, first byte 0xfe); return their number."""
    buffer = bytearray(BUFFER_BYTES)
    received, tail = 0, b""
    while True:
        count = channel.recv_into(buffer)
        if not count:
            raise ConnectionError(f"the server closed the connection after {received} bytes")
        received += count
        tail = (tail + bytes(buffer[max(0, count - 9) : count]))[-9:]
        if tail[:3] == b"\x05\x00\x00" and tail[4:5] == b"\xfe":
            return received
