# SPDX-License-Identifier: Apache-2.0
"""Write the samples of one version from real servers, with the product's own commands.

    python -m tests.samples.write VERSION

The pipelines' files and the settings files of the version's folder are written by hand; this program writes
everything else in the folder, which must not contain samples yet. Identities, times and ports differ from run
to run.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.store import open_store
from penstock.coordinate.subscription_record import Subscription, Subscriptions
from penstock.logstore.catalog import FolderCatalog
from penstock.logstore.cold import make_cold
from penstock.logstore.disk import LocalDisk
from penstock.logstore.layout import Layout
from penstock.model import Position
from penstock.source.kept_stream_log import KeptStreamLog
from penstock.source.stream_log import StreamLog
from penstock.spark.options import parse_settings
from tests.samples.program import SUBSCRIPTION
from tests.samples.shop import ORDERS, Shop
from tests.support.capture.captured_log import (
    capturing,
    head_of,
    rotate,
    settings_of,
    wait_for,
    wait_for_position,
)
from tests.support.daemon.process import DaemonProcess
from tests.support.logstore.kept_log import BLOCK_BYTES
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import REPLICATION_PASSWORD, REPLICATION_USER, Server

SAMPLES = Path(__file__).parent
ROOT = SAMPLES.parents[1]
ACCOUNT = "account.json"
# Files of a running process, which are not part of a sample.
_NOT_KEPT = shutil.ignore_patterns("lock", "*.tmp", "*-wal", "*-shm", "_staged_aside")
_FOREVER_SECONDS = 100 * 365 * 86_400


def main() -> None:
    """Write every sample of the given version."""
    (version,) = sys.argv[1:]
    target = SAMPLES / version
    written = [name for name in ("log", "spark", "coordination") if (target / name).exists()]
    if written:
        raise SystemExit(f"{target} has {', '.join(written)} already: samples are never written again")
    with tempfile.TemporaryDirectory(prefix="penstock-samples-") as name:
        work = Path(name)
        (work / "pipelines").mkdir()
        for file in (target / "pipelines").glob("*.yaml"):
            shutil.copy(file, work / "pipelines")
        account = {"shop": write_shop(work), "moved": write_moved(work)}
        for part in ("log/shop", "log/moved", "spark", "coordination", "pipelines"):
            shutil.copytree(work / part, target / part, ignore=_NOT_KEPT, dirs_exist_ok=True)
    text = json.dumps(account, indent=1, ensure_ascii=False, sort_keys=True)
    (target / ACCOUNT).write_text(text + "\n", encoding="utf-8")


# --- One server and its readers -----------------------------------------------------------


def write_shop(work: Path) -> dict[str, Any]:
    """Write the log of a server without column names and the state of its readers; return the record."""
    with Server("mysql", {"binlog_row_metadata": "MINIMAL"}) as server:
        rotate(server)
        shop, start = Shop(server), head_of(server).file + ":4"
        settings = {
            "log": {
                "folder": str(work / "log"),
                "block_bytes": BLOCK_BYTES,
                "retention": {"age": None},
            },
            "instances": {"shop": {"source": server.url(), "start": start}},
        }
        with DaemonProcess(work, settings) as daemon:
            _change_and_read(shop, daemon, work, start)
            daemon.post(
                "/v1/instances/shop/position",
                reader="warehouse",
                position=shop.phases[0]["position"],
                seconds=_FOREVER_SECONDS,
            )
            offsets = _offsets(server, work, shop)
            assert daemon.terminate() == 0
        (work / "spark" / "offsets.json").write_text(json.dumps(offsets, indent=1) + "\n")
        account = shop.account()
    account["files"] = [file for file in account["files"] if file >= start.partition(":")[0]]
    account["transactions"] = [one for one in account["transactions"] if one["start"] >= start]
    compress_first(work / "log" / "shop")
    return {"start": start, **account}


def _change_and_read(shop: Shop, daemon: DaemonProcess, work: Path, start: str) -> None:
    """Change the tables in three phases; each reader follows some of them."""
    shop.create()
    shop.insert(1)
    shop.update(3, "99.25")
    shop.delete(2)
    shop.note("ann", "first")
    rotate(shop.server)
    _end_phase(shop, daemon, "loaded")
    with following(work, daemon):
        _run_readers(shop, work, start)
        _wait_until_consumed(work, shop)
    shop.alter()
    shop.insert(101)
    shop.update(4, "98.75")
    rotate(shop.server)
    shop.delete(5)
    shop.note("ben", "second")
    _end_phase(shop, daemon, "streamed")
    _run_readers(shop, work, start)
    shop.insert(201, 6)
    shop.update(101, "97.00")
    shop.delete(102)
    _end_phase(shop, daemon, "captured")
    begin_batch(shop, work)
    penstock(shop, work, "resnapshot", work / "pipelines/shop-lake.yaml", ORDERS, "--where", "id < 10")
    penstock(shop, work, "pipelines", "pause", work / "pipelines/shop-lake.yaml")
    reshape_subscription(shop, work)


def _end_phase(shop: Shop, daemon: DaemonProcess, name: str) -> None:
    position = Position.parse(shop.end_phase(name)["position"])
    daemon.wait_for_head(position.file, position.offset)


def _run_readers(shop: Shop, work: Path, start: str) -> None:
    """Run both pipelines and both streams up to the end of the log."""
    for pipeline in ("shop-lake", "shop-feed"):
        penstock(shop, work, *_run_words(work, pipeline))
    stream(work / "spark/kept", path=str(work / "log/shop"), tables=ORDERS, columns="id,code,total")
    stream(
        work / "spark/server",
        source=shop.server.url(),
        tables=ORDERS,
        columns="id,code,total",
        startingOffsets=start,
        schemaTrackingLocation=str(work / "spark/server/tracking"),
    )


def _run_words(work: Path, pipeline: str) -> tuple[object, ...]:
    return "run", work / f"pipelines/{pipeline}.yaml", "--until", "caught-up", "--master", "local[2]"


def begin_batch(shop: Shop, work: Path) -> None:
    """Make the feed's pipeline begin a batch that fails because a file has replaced the folder for staged
    files.
    """
    staged = work / "pipelines/feed/shop/orders/_staged"
    staged.rename(staged.with_name("_staged_aside"))
    staged.write_text("")
    done = _penstock(shop, work, *_run_words(work, "shop-feed"))
    assert done.returncode != 0, "the batch was written"
    staged.unlink()
    staged.with_name("_staged_aside").rename(staged)
    # Git does not store empty folders, so this file records that the folder exists.
    (staged / ".keep").write_text("")


def penstock(shop: Shop, work: Path, *words: object) -> None:
    """Run a command of the product. Raises CalledProcessError."""
    done = _penstock(shop, work, *words)
    if done.returncode:
        print(done.stdout.decode(), done.stderr.decode(), file=sys.stderr)
        done.check_returncode()


def _penstock(shop: Shop, work: Path, *words: object) -> "subprocess.CompletedProcess[bytes]":
    environment = {**os.environ, "FOLDER": str(work), "SERVER": shop.server.url("root")}
    command = [*_program("penstock"), *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)


def stream(folder: Path, **options: str) -> None:
    """Run a Spark stream with these options until it has read all available changes."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([*_program("stream"), str(folder), json.dumps(options)], cwd=ROOT, check=True)


def _program(name: str) -> list[str]:
    return [sys.executable, "-m", "tests.samples.program", name]


def _offsets(server: Server, work: Path, shop: Shop) -> dict[str, Any]:
    """Return an offset of each kind of source, as Spark stores it."""
    kept, gtid_set = {"path": str(work / "log/shop"), "tables": ORDERS}, shop.phases[0]["gtid_set"]
    files = json.dumps([str(path) for path in server.binlog_files()])
    logs = {
        "kept": KeptStreamLog(parse_settings({**kept, "startingOffsets": "latest"})),
        "kept_by_set": KeptStreamLog(parse_settings({**kept, "startingOffsets": gtid_set})),
        "server": StreamLog(parse_settings({"source": server.url(), "tables": ORDERS})),
        "files": StreamLog(parse_settings({"paths": files, "tables": ORDERS})),
    }
    offsets = {name: log.first().to_json() for name, log in logs.items()}
    for log in logs.values():
        log.close()
    return offsets


# --- Subscriptions --------------------------------------------------------------------------


@contextmanager
def following(work: Path, daemon: DaemonProcess) -> Iterator[None]:
    """Run a subscriber inside the block; kill it at the end of the block, while it holds its leases."""
    store = work / "coordination/running.db"
    store.parent.mkdir()
    url = f"penstock://127.0.0.1:{daemon.port}/shop"
    process = subprocess.Popen([*_program("follow"), url, f"sqlite://{store}"], cwd=ROOT)
    try:
        yield
    finally:
        process.kill()
        process.wait(WAIT_SECONDS_MAX)
        # Checkpoint the WAL with sqlite3: opening the store instead would remove expired sessions.
        with closing(sqlite3.connect(store)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _wait_until_consumed(work: Path, shop: Shop) -> None:
    """Wait until both shards of the subscriber have consumed the first phase."""
    store = open_store(f"sqlite://{work}/coordination/running.db", WAIT_SECONDS_MAX)
    subscriptions = Subscriptions(store)
    end = Position.parse(shop.phases[0]["position"])

    def consumed() -> bool:
        subscription = subscriptions.get("shop", SUBSCRIPTION)
        if subscription is None:
            return False
        states = [view.state for view in subscriptions.shards(subscription)]
        reached = [state.checkpoint and Position.parse(state.checkpoint.position) for state in states]
        return len(reached) == 2 and all(place is not None and place >= end for place in reached)

    wait_until(consumed)
    store.close()


def reshape_subscription(shop: Shop, work: Path) -> None:
    """Change the number of shards of a subscription. Its shards have different positions, so the change
    creates floors.
    """
    url = f"sqlite://{work}/coordination/resized.db"
    store = open_store(url, WAIT_SECONDS_MAX)
    subscriptions = Subscriptions(store)
    report = subscriptions.create(Subscription("shop", "report", (ORDERS,), shard_count=2))
    key = shop.account()["server_key"]
    for shard, phase in enumerate(shop.phases[:2]):
        checkpoint = Checkpoint.now(phase["position"], phase["gtid_set"], key, phase["time_us"])
        report.checkpoints(store).reset(shard, checkpoint)
    store.close()
    penstock(shop, work, "subscriptions", "resize", "report", 3, "--coordination", url, "--yes")


# --- Logs -----------------------------------------------------------------------------------


def compress_first(folder: Path) -> None:
    """Replace a log's first segment by its cold form."""
    disk, layout = LocalDisk(), Layout(folder)
    held = disk.lock(layout.lock)
    catalog = FolderCatalog.load(disk, layout)
    make_cold(disk, layout, catalog, catalog.segments[0])
    held.close()


def write_moved(work: Path) -> dict[str, Any]:
    """Write the log of a MariaDB server that was replaced by its replica; return the records of both
    servers.
    """
    options = {"log_slave_updates": True, "relay_log": "relay"}
    with Server("mariadb") as primary, Server("mariadb", options) as replica:
        replica.sql(
            f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={primary.port},"
            f" MASTER_USER='{REPLICATION_USER}', MASTER_PASSWORD='{REPLICATION_PASSWORD}',"
            " MASTER_USE_GTID=slave_pos; START SLAVE"
        )
        primary.sql("CREATE DATABASE shop; CREATE TABLE shop.stock (id INT PRIMARY KEY, item VARCHAR(90))")
        servers = [f"127.0.0.1:{replica.port}"]
        settings = settings_of(
            work / "moved",
            primary.url(),
            log={"block_bytes": BLOCK_BYTES},
            servers=servers,
            start="earliest",
            fail_over_after="300ms",
        )
        with capturing(settings) as capture:
            _stock(primary, 1, 20)
            end_of_first = head_of(primary)
            wait_for_position(capture, end_of_first)
            first = _gtids(primary)
            wait_until(lambda: _gtids(replica) == first)
            primary.stop()
            wait_for(capture, lambda status: status.epoch == 1 and status.position is not None)
            _stock(replica, 21, 40)
            head = head_of(replica)
            wait_for(capture, lambda status: status.position == f"1/{head}")
        moved = {"first_gtid_set": first, "first_end": str(end_of_first)}
        moved |= {"gtid_set": _gtids(replica), "end": f"1/{head}"}
        rows = replica.sql("SELECT id, item FROM shop.stock ORDER BY id")
    shutil.move(work / "moved/shop", work / "log/moved")
    return {**moved, "rows": [{"id": number, "item": item} for number, item in rows]}


def _stock(server: Server, first: int, last: int) -> None:
    for number in range(first, last + 1):
        server.sql("INSERT INTO shop.stock VALUES (%s, %s)", number, f"item {number} " + "ü" * 40)


def _gtids(server: Server) -> str:
    return str(server.sql("SELECT @@GLOBAL.gtid_binlog_pos")[0][0])


if __name__ == "__main__":
    main()
