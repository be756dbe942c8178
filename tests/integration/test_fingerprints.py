# SPDX-License-Identifier: Apache-2.0
"""A server reuses its file names after a reset: a reader that resumes at any earlier position detects
this.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.capture.status import State
from penstock.errors import PositionInvalid
from penstock.fingerprint import file_fingerprint
from penstock.gtid_sets import NO_GTIDS
from penstock.logstore.reader import LogReader
from penstock.model import ServerAddress
from penstock.source.files import FileSource
from penstock.source.offsets import Offset
from penstock.source.read_settings import ReadSettings
from penstock.source.server import ServerSource
from penstock.source.source import SourceOptions
from penstock.source.stream_log import StreamLog
from penstock.source.walk import TransactionWalk
from penstock.spark.options import parse_settings
from tests.support.capture.captured_log import (
    capturing,
    head_of,
    settings_of,
    wait_for,
    wait_for_position,
    wait_for_state,
)
from tests.support.suite.fixture_types import StartServer
from tests.support.suite.patience import wait_for_next_second
from tools.servers import Server


def write(server: Server, count: int) -> None:
    for number in range(count):
        server.sql(f"INSERT INTO d.t VALUES ({number})")


def settings_for(server: Server) -> ReadSettings:
    return parse_settings({"source": server.url("root"), "tables": "d.t"})


def reset(server: Server, *, keep_gtids: bool) -> None:
    """Reset the server's log, and let it grow beyond its earlier end."""
    executed = server.sql("SELECT @@GLOBAL.gtid_executed")[0][0] if keep_gtids else ""
    wait_for_next_second()
    server.sql("RESET MASTER" if server.family == "mariadb" else "RESET BINARY LOGS AND GTIDS")
    if keep_gtids:
        server.sql(f"SET GLOBAL gtid_purged = '{executed}'")
    write(server, 20)


# Other tests cover the rules without a server; this test covers the bytes that servers send.
pytestmark = pytest.mark.deep_flavors("mariadb")


@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_restarted_log_is_detected_at_every_position(
    start_server: StartServer, tmp_path: Path, flavor: str
) -> None:
    server = start_server(flavor)
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (a INT)")
    write(server, 3)
    address = ServerAddress.parse(server.url("root"))
    source = ServerSource(SourceOptions(address=address, instance="shop"))
    stream = StreamLog(settings_for(server))
    settings = settings_of(tmp_path, server.url())
    with capturing(settings) as capture:
        wait_for_state(capture, State.RUNNING)
        begin = stream.first()
        write(server, 3)
        wait_for_position(capture, head_of(server))
    # A file, the server that sends it, and a log that holds only its end have the same fingerprint.
    file = server.binlog_files()[-1]
    kept = LogReader.open(tmp_path / "shop").head_bytes(0, file.name)
    files = FileSource(SourceOptions(paths=(str(file),)))
    assert {source.fingerprint(file.name), files.fingerprint(file.name), file_fingerprint(kept)} == {
        begin.fingerprint
    }
    (byte_range,) = stream.plan(begin, stream.unlimited(begin, stream.head_behind(begin)))[1]
    assert byte_range.fingerprint == begin.fingerprint

    # An offset of version 0.1 has no fingerprint, and its GTID set may be incomplete.
    assert StreamLog(settings_for(server)).resume(replace(begin, fingerprint="", gtid_set=NO_GTIDS)) == begin

    reset(server, keep_gtids=False)
    with pytest.raises(PositionInvalid, match="was begun at"):
        StreamLog(settings_for(server)).resume(begin)
    with pytest.raises(PositionInvalid, match="was begun at"):
        list(TransactionWalk(source, byte_range))
    with capturing(settings) as capture:
        wait_for(capture, lambda status: status.error is not None)
        wait_for_state(capture, State.STOPPED)
    if flavor == "mariadb":
        return
    # A restore keeps the GTIDs, so capture and streams use them to continue in a new epoch.
    (tmp_path / "shop").rename(tmp_path / "before")
    with capturing(settings) as capture:
        wait_for_state(capture, State.RUNNING)
        write(server, 2)
        wait_for_position(capture, head_of(server))
    begin = StreamLog(settings_for(server)).first()
    reset(server, keep_gtids=True)
    with capturing(settings) as capture:
        status = wait_for(
            capture, lambda status: status.epoch == 1 and status.position == f"1/{head_of(server)}"
        )
        assert status.note is not None
        assert "was begun at" in status.note
    here = StreamLog(settings_for(server)).resume(begin)
    assert here == Offset(here.position, begin.gtid_set, begin.server_key, by_set=True)
    assert here.position.epoch == 1
