# SPDX-License-Identifier: Apache-2.0
"""`penstock log` on logs captured from real servers."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

import penstock as penstock_package
from penstock.cli.shared.log_folder import moment, parse_time
from penstock.logstore.catalog import FolderCatalog
from penstock.logstore.cold import make_cold
from penstock.logstore.disk import LocalDisk
from penstock.logstore.holds import Hold, Holds
from penstock.logstore.layout import Layout
from penstock.logstore.tier import Tier
from penstock.model import Position
from tests.support.capture.captured_log import capturing, head_of, wait_for_position
from tests.support.logstore.kept_log import KeptLog, insert, penstock, transactions
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")


@pytest.fixture(scope="module", params=["mysql", "mariadb"])
def kept(
    request: pytest.FixtureRequest,
    server_of: Callable[[str], Server],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[KeptLog]:
    server = server_of(request.param)
    server.sql("CREATE DATABASE cli_log")
    yield KeptLog.capture(server, tmp_path_factory.mktemp(request.param), "cli_log")
    server.sql("DROP DATABASE cli_log")


@pytest.fixture
def copied(kept: KeptLog, tmp_path: Path) -> KeptLog:
    """A copy of the log that a test may damage."""
    return kept.copy(tmp_path / "copy")


# --- list and show --------------------------------------------------------------------------


def test_list_shows_each_segment_with_its_server_position(kept: KeptLog) -> None:
    block, other = penstock("log", "list", kept.folder, "--json").objects
    (first, first_size), (second, _) = kept.files.items()
    logged = kept.logged
    assert (block["file"], block["to"], block["epoch"], block["state"]) == (first, first_size, 0, "closed")
    assert (other["file"], other["to"]) == (second, kept.head.offset)
    for line in (block, other):
        assert line["transactions"] == sum(each.start.file == line["file"] for each in logged)
        path = kept.folder / str(line["hour"]) / f"{line['segment']}.binlog"
        assert line["bytes"] == path.stat().st_size
    assert (block["changes"], other["changes"]) == (60, 40)
    assert block["first"] <= block["last"] < kept.split.isoformat() <= other["first"]
    shown = penstock("log", "list", "--config", kept.config, "shop")
    assert shown.lines[-1].startswith(f"2 segments, {len(logged)} transactions, 100 changes")


def test_list_counts_a_segment_that_is_being_written(copied: KeptLog) -> None:
    server = copied.server
    with capturing(copied.settings) as capture:
        insert(server, copied.database, 3)
        wait_for_position(capture, head_of(server))
        line = penstock("log", "list", copied.folder, "--json").objects[-1]
        assert (line["state"], line["to"]) == ("open", head_of(server).offset)
        here = transactions(server, [line["file"]])
        assert line["transactions"] == len(
            [transaction for transaction in here if transaction.start.offset >= line["from"]]
        )


def test_show_lists_contiguous_blocks_of_a_segment(kept: KeptLog) -> None:
    listed = penstock("log", "list", kept.folder, "--json").objects[0]
    shown = penstock("log", "show", kept.folder, int(listed["segment"]), "--json").one
    blocks = shown["blocks"]
    assert len(blocks) > 3
    assert [blocks[0]["from"], *(block["to"] for block in blocks)] == [
        *(block["from"] for block in blocks),
        listed["to"],
    ]
    assert sum(block["transactions"] for block in blocks) == listed["transactions"]
    gtids = {
        transaction.start.offset: transaction.gtid
        for transaction in kept.logged
        if transaction.start.file == listed["file"]
    }
    assert {block["from"]: block["gtid"] for block in blocks[1:]}.items() <= gtids.items()
    assert penstock("log", "show", shown["path"], "--json").one == shown
    people = penstock("log", "show", kept.folder, listed["segment"], "--limit", 2)
    assert len([line for line in people.lines if " boundary " in line]) == 2
    assert "--limit 0" in people.err


def test_folder_that_is_not_a_log_is_refused_with_a_hint(kept: KeptLog, tmp_path: Path) -> None:
    assert "ls" in penstock("log", "list", tmp_path).err
    above = penstock("log", "list", kept.root)
    assert above.code == 2
    assert str(kept.folder) in above.err
    assert "shop" in penstock("log", "list", "--config", kept.config, "nobody").err
    assert penstock("log", "list").code == 2
    assert "penstock log list" in penstock("log", "show", kept.folder, "12").err


# --- locate ---------------------------------------------------------------------------------


def test_locate_returns_the_exact_transaction_and_its_cost(kept: KeptLog) -> None:
    logged = kept.logged
    for number in (0, 17, 61, 80, len(logged) - 1):
        transaction = logged[number]
        by_gtid = penstock("log", "locate", kept.folder, "--gtid", transaction.gtid, "--json").one
        assert by_gtid["position"] == str(transaction.start)
        assert 0 < by_gtid["pages_read"] < 12
        assert 0 < by_gtid["bytes_read"] < 8192
        # The GTID set contains the transaction, so the next transaction follows, even across the end of a
        # file.
        after = penstock(
            "log", "locate", kept.folder, "--gtid-set", kept.set_upto(transaction.gtid), "--json"
        ).one
        follower = logged[number + 1].start if number + 1 < len(logged) else kept.head
        assert after["position"] in (str(follower), str(transaction.end))
        by_position = penstock("log", "locate", kept.folder, "--position", transaction.start, "--json").one
        assert by_position["block_from"] <= transaction.start.offset < by_position["block_to"]
        head_bytes = penstock("log", "show", kept.folder, by_position["segment"], "--json").one["head_bytes"]
        data = kept.folder.glob(f"*/{by_position['segment']}.binlog")
        content = next(data).read_bytes()[by_position["segment_offset"] :][:19]
        assert len(content) == 19
        assert by_position["segment_offset"] >= head_bytes
        server_file = next(path for path in kept.server.binlog_files() if path.name == transaction.start.file)
        assert server_file.read_bytes()[transaction.start.offset :][:19] == content


def test_locate_by_time_returns_the_first_transaction_from_then_on(kept: KeptLog) -> None:
    first_after = next(
        transaction for transaction in kept.logged if transaction.start.file != kept.start.file
    )
    for text in (kept.split.isoformat(), f"{kept.split:%H:%M:%S}"):
        line = penstock("log", "locate", kept.folder, "--time", text, "--json").one
        assert line["position"] == str(first_after.start)
    late = penstock("log", "locate", kept.folder, "--time", "2100-01-01", "--json").one
    assert late["is_end"]
    text = penstock("log", "locate", kept.folder, "--time", "2100-01-01").out
    assert re.search(r"^  is end +yes$", text, re.MULTILINE)
    assert not re.search(r"_|True|None", text.partition("is end")[2]), text
    assert late["position"] == str(kept.head)


def test_time_of_day_is_its_most_recent_occurrence() -> None:
    now = datetime(2026, 11, 21, 14, 0, tzinfo=UTC)
    for text, expected in (
        ("13:59", datetime(2026, 11, 21, 13, 59, tzinfo=UTC)),
        ("9:05:00.5", datetime(2026, 11, 21, 9, 5, 0, 500_000, tzinfo=UTC)),
        ("14:05:00", datetime(2026, 11, 20, 14, 5, tzinfo=UTC)),
        ("2026-11-19T14:05:00+01:00", datetime(2026, 11, 19, 13, 5, tzinfo=UTC)),
    ):
        assert moment(parse_time(text, now)) == expected, text


def test_locate_accepts_one_position_and_reports_where_the_log_starts(kept: KeptLog) -> None:
    assert penstock("log", "locate", kept.folder).code == 2
    assert penstock("log", "locate", kept.folder, "--time", "25:00").code == 2
    stem, _, digits = kept.start.file.rpartition(".")
    before = penstock("log", "locate", kept.folder, "--position", f"{stem}.{'0' * len(digits)}:4")
    assert before.code == 2
    assert "PositionPurged" in before.err


def test_segment_in_a_store_is_listed_and_searched_if_the_store_is_named(
    copied: KeptLog, tmp_path: Path
) -> None:
    url = (tmp_path / "store").as_uri()
    disk, layout = LocalDisk(), Layout(copied.folder)
    catalog = FolderCatalog.load(disk, layout)
    cold = make_cold(disk, layout, catalog, catalog.segments[0])
    assert penstock("log", "list", copied.folder, "--json").objects[0]["state"] == "cold"
    Tier(url, disk, layout).move(catalog, cold)
    settings = yaml.safe_load(copied.config.read_text())
    settings["log"]["tier"] = url
    copied.config.write_text(yaml.safe_dump(settings))
    named = ("--config", copied.config, "shop")
    listed = penstock("log", "list", copied.folder, "--json").objects
    assert penstock("log", "list", *named, "--json").objects == listed
    assert [report["state"] for report in listed] == ["tiered", "closed"]
    assert listed[0]["transactions"] == 61
    assert penstock("log", "show", *named, listed[0]["segment"], "--json").one["blocks"]
    transaction = copied.logged[30]
    assert penstock("log", "locate", *named, "--gtid", transaction.gtid, "--json").one["position"] == str(
        transaction.start
    )
    assert penstock("log", "verify", *named).code == 0
    refused = penstock("log", "locate", copied.folder, "--gtid", transaction.gtid)
    assert refused.code == 2
    assert "tier" in refused.err


# --- verify ---------------------------------------------------------------------------------


def test_sound_log_has_no_finding_and_a_flipped_bit_has_one(copied: KeptLog) -> None:
    sound = penstock("log", "verify", copied.folder)
    assert (sound.code, len(sound.lines)) == (0, 1)
    assert sound.out.endswith("read, sound\n")
    transaction = copied.logged[30]
    position = penstock("log", "locate", copied.folder, "--position", transaction.start, "--json").one
    (segment,) = copied.folder.glob(f"*/{position['segment']}.binlog")
    content = bytearray(segment.read_bytes())
    content[position["segment_offset"] + 40] ^= 1
    segment.write_bytes(content)
    broken = penstock("log", "verify", copied.folder, "--json")
    assert broken.code == 1
    (finding,) = [line for line in broken.objects if line["kind"] == "data"]
    assert finding["name"] == segment.name
    assert finding["position"].startswith(f"{transaction.start.file}:")
    assert finding["mend"]
    assert not finding["harmless"]
    assert segment.name in penstock("log", "verify", copied.folder).out


def test_verify_rebuilds_indexes_and_changes_no_data(copied: KeptLog) -> None:
    index = next(copied.folder.glob("*/*.index"))
    index.write_bytes(index.read_bytes()[:200] + b"\xff" + index.read_bytes()[201:])
    before = {path: path.read_bytes() for path in copied.folder.glob("*/*.binlog")}
    output = penstock("log", "verify", copied.folder)
    assert output.code == 1
    assert "penstock log verify --heal" in output.out
    healed = penstock("log", "verify", copied.folder, "--heal", "--json")
    assert healed.code == 0
    assert healed.objects
    assert all(line["healed"] for line in healed.objects)
    assert penstock("log", "verify", copied.folder, "--json").objects == []
    assert {path: path.read_bytes() for path in copied.folder.glob("*/*.binlog")} == before


# --- export ---------------------------------------------------------------------------------


def test_export_writes_a_range_that_the_servers_own_tool_reads(kept: KeptLog, tmp_path: Path) -> None:
    logged = kept.logged
    first, last = logged[10], logged[20]
    target = tmp_path / "some.binlog"
    line = penstock(
        "log", "export", kept.folder, "--from", first.start, "--to", last.end, "-o", target, "--json"
    ).one
    assert (line["from"], line["to"], line["bytes"]) == (
        str(first.start),
        str(last.end),
        target.stat().st_size,
    )
    tool = subprocess.run(
        [*kept.server.program("mysqlbinlog"), "--no-defaults", "--base64-output=decode-rows", "-v", target],
        capture_output=True,
        text=True,
        check=True,
    )
    assert tool.stdout.count("### INSERT INTO") == 11
    assert [path.name for path in tmp_path.iterdir()] == ["some.binlog"]


def test_export_accepts_times_and_a_folder_for_several_files(kept: KeptLog, tmp_path: Path) -> None:
    refused = penstock("log", "export", kept.folder, "-o", tmp_path / "all.binlog")
    assert refused.code == 2
    assert f"-o {tmp_path / 'all.binlog'}/" in refused.err
    assert penstock("log", "export", kept.folder, "-o", f"{tmp_path}/all/").code == 0
    assert [path.name for path in sorted((tmp_path / "all").iterdir())] == list(kept.files)
    read = penstock_package.read_binlog(str(tmp_path / "all" / "*"), tables=f"{kept.database}.t")
    assert sum(batch.to_arrow().num_rows for batch in read) == 100
    later = penstock(
        "log", "export", kept.folder, "--from", kept.split.isoformat(), "-o", tmp_path / "l.000001"
    )
    assert later.code == 0
    read = penstock_package.read_binlog(str(tmp_path / "l.000001"), tables=f"{kept.database}.t")
    assert sum(batch.to_arrow().num_rows for batch in read) == 40
    again = penstock("log", "export", kept.folder, "-o", f"{tmp_path}/all/")
    assert again.code == 2
    assert "is there already" in again.err
    times = "--from", "2001-01-01T00:00:00", "--to", "2001-01-02T00:00:00"
    earlier = penstock("log", "export", kept.folder, *times, "-o", tmp_path / "e.000001")
    assert (earlier.code, "the log has nothing between" in earlier.err) == (2, True), earlier


# --- trim -----------------------------------------------------------------------------------


def test_trim_removes_whole_segments_and_logs_a_line(copied: KeptLog) -> None:
    first, second = penstock("log", "list", copied.folder, "--json").objects
    words = ("log", "trim", copied.folder, "--before", copied.split.isoformat())
    planned = penstock(*words, "--dry-run", "--json").one
    assert planned["segments"] == [first["segment"]]
    assert planned["bytes_freed"] == 0
    assert len(penstock("log", "list", copied.folder, "--json").objects) == 2
    done = penstock(*words, "--json", "--reason", "room").one
    assert done["segments"] == [first["segment"]]
    assert done["bytes_freed"] >= first["bytes"]
    assert [line["segment"] for line in penstock("log", "list", copied.folder, "--json").objects] == [
        second["segment"]
    ]
    assert not list(copied.folder.glob(f"*/{first['segment']}.*"))
    assert penstock("log", "verify", copied.folder).code == 0
    (deed,) = map(json.loads, (copied.folder / "audit.log").read_text().splitlines())
    assert (deed["verb"], deed["reason"]) == ("log trim", "room")
    # The newest segment is never removed.
    assert penstock("log", "trim", copied.folder, "--before", "2100-01-01", "--json").one["segments"] == []


def test_trim_stops_at_a_hold_unless_it_is_named(copied: KeptLog) -> None:
    held = copied.logged[5].start
    holds = Holds(LocalDisk(), Layout(copied.folder))
    holds.put(Hold("billing", held))
    holds.put(Hold("later", copied.head))
    end = Position(0, list(copied.files)[1], 4)
    refused = penstock("log", "trim", copied.folder, "--before", end)
    assert refused.code == 2
    assert str(held) in refused.err
    assert "--force billing" in refused.err
    assert "later" not in refused.err
    assert len(penstock("log", "list", copied.folder, "--json").objects) == 2
    assert penstock("log", "trim", copied.folder, "--before", end, "--force", "other").code == 2
    assert penstock("log", "trim", copied.folder, "--before", end, "--force", "billing").code == 0
    assert len(penstock("log", "list", copied.folder, "--json").objects) == 1
    assert "--force billing" in (copied.folder / "audit.log").read_text()


def test_log_in_use_is_neither_trimmed_nor_healed(copied: KeptLog) -> None:
    with capturing(copied.settings) as capture:
        wait_for_position(capture, head_of(copied.server))
        late = (copied.split + timedelta(days=1)).isoformat()
        for words in (("trim", copied.folder, "--before", late), ("verify", copied.folder, "--heal")):
            refused = penstock("log", *words)
            assert refused.code == 2, words
            assert "LogLocked" in refused.err
        assert penstock("log", "trim", copied.folder, "--before", late, "--dry-run").code == 0
