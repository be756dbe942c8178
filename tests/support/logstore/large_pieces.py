# SPDX-License-Identifier: Apache-2.0
"""A capture of large pieces. `python -m tests.support.logstore.large_pieces FOLDER` appends until a kill.

The command prints after each sync the durable offset and the number of bytes that were written directly.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

from penstock._native import BlockCutter
from penstock.capture.receive import Progress, Receiver
from penstock.gtid_sets import NO_GTIDS
from penstock.limits import CAPTURE_CHUNK_BYTES, MIB
from penstock.logstore import direct
from penstock.logstore.direct import DirectWriter
from penstock.logstore.log import Log
from penstock.settings.daemon import LogSettings
from tests.support.binlog.events import assemble
from tests.support.binlog.forged_log import insert, log_head

FILE = "mysql-bin.000001"
HEAD = log_head(1)
START = len(HEAD)
SETTINGS = LogSettings(fsync="never", mode="file", segment_bytes=16 * MIB)
_SOURCE: dict[str, Any] = {"epoch": 0, "server_id": 1, "flavor": "mysql"}


def pieces() -> Iterator[bytes]:
    """Yield the events of a file from START on, about two megabytes at a time, without end."""
    offset, number = START, 0
    while True:
        piece = b""
        while len(piece) < 2 * MIB:
            number += 1
            note = bytes([number % 256]) * (200_000 + number)
            piece += assemble(insert(number, "shop.notes", number, note), offset=offset + len(piece))
        yield piece
        offset += len(piece)


def begin(log: Log) -> tuple[Receiver, BlockCutter]:
    """Begin the file in an empty log."""
    log.begin_epoch(
        **_SOURCE, server_key="mysql:1", version="9.7.4", file=FILE, offset=START, gtid_set=NO_GTIDS
    )
    log.begin_file(FILE, START, HEAD[4:], NO_GTIDS, **_SOURCE)
    receiver = Receiver(
        log,
        Progress(),
        Event(),
        **_SOURCE,
        chunk_bytes=CAPTURE_CHUNK_BYTES,
        schemas=None,
        hold=lambda why: None,
        arrived=lambda: None,
    )
    return receiver, BlockCutter(epoch=0, file=FILE, offset=START, flavor="mysql", live=False, head=HEAD)


def main() -> None:
    """Append pieces to a log until the process is killed."""
    written = 0
    write = DirectWriter.write

    def write_and_count(self: DirectWriter, blocks: memoryview, offset: int) -> int:
        nonlocal written
        size = write(self, blocks, offset)
        written += size
        return size

    DirectWriter.write = write_and_count  # type: ignore[method-assign]
    # Other work on this machine may make any write slow.
    direct.DIRECT_BYTES_PER_SECOND_MIN = 0
    with Log.open(Path(sys.argv[1]), SETTINGS) as log:
        receiver, cutter = begin(log)
        for number, piece in enumerate(pieces()):
            receiver.feed(piece, cutter)
            if number % 3 == 2:
                durable = log.sync()
                assert durable is not None
                print(durable.offset, written, flush=True)


if __name__ == "__main__":
    main()
