# SPDX-License-Identifier: Apache-2.0
"""Migrated settings work on a real server and continue where the original system stopped."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from kazoo.client import KazooClient

from penstock.local.driver import LocalDriver
from penstock.migrate.bifrost import migrate_bifrost
from penstock.migrate.canal import migrate_canal
from penstock.migrate.debezium import migrate_debezium
from penstock.migrate.maxwell import migrate_maxwell
from penstock.migrate.output import Migration
from penstock.migrate.ptubes import migrate_ptubes
from penstock.pipeline.settings import load_pipeline
from tests.integration.test_sink_kafka import broker  # noqa: F401
from tests.support.canal.following import arrived, connect, drain
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess
from tests.support.migrate.samples import ORIGINALS
from tests.support.pipeline.running import run_to_end
from tests.support.ptubes.client import PtubesClient
from tests.support.ptubes.shop import INSERT, of_kind
from tests.support.sinks.kafka_reading import records
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tests.unit.test_migrate_canal import copy_of_canal
from tools.kafka import Kafka
from tools.servers import Server
from tools.zookeeper import ZooKeeper


@pytest.fixture
def server(server_of: Callable[[str], Server]) -> Iterator[Server]:
    actual = server_of("mysql")
    yield actual
    for database in (
        "from_bifrost",
        "by_bifrost",
        "penstock",
        "from_ptubes",
        "from_canal",
        "not_from_canal",
        "from_debezium",
        "from_maxwell",
        "maxwell",
    ):
        actual.sql(f"DROP DATABASE IF EXISTS {database}")


def table_with_rows(server: Server, database: str) -> list[tuple[str, int, str, int]]:
    """Create a table with three rows; return the events of the second transaction and later ones."""
    server.sql(f"CREATE DATABASE {database}; CREATE TABLE {database}.t (id INT PRIMARY KEY)")
    server.sql(f"INSERT INTO {database}.t VALUES (1)")
    start = head_of(server)
    for number in (2, 3):
        server.sql(f"INSERT INTO {database}.t VALUES ({number})")
    events = server.sql(f"SHOW BINLOG EVENTS IN '{start.file}' FROM {start.offset}")
    return [(str(event[0]), int(event[1]), str(event[2]), int(event[4])) for event in events]


def account_of(server: Server) -> tuple[str, str, str]:
    parts = urlsplit(server.url())
    return f"{parts.hostname}:{parts.port}", unquote(parts.username or ""), unquote(parts.password or "")


@pytest.mark.deep(guard="tests/unit/test_migrate_canal.py::test_cursors_become_checkpoints_of_the_clients")
def test_client_of_canal_continues_at_its_cursor(server: Server, tmp_path: Path) -> None:
    # Canal's cursor is the end of the transaction that was acknowledged last.
    file, offset, *_ = next(event for event in table_with_rows(server, "from_canal") if event[2] == "Xid")
    address, user, password = account_of(server)
    instance = (
        f"canal.instance.master.address={address}\ncanal.instance.dbUsername={user}\n"
        f"canal.instance.dbPassword={password}\ncanal.instance.standby.address=\n"
        "canal.instance.filter.regex=from_canal\\\\..*\n"
    )
    conf = copy_of_canal(tmp_path, instance=instance)
    meta = json.loads((conf / "shop/meta.dat").read_text())
    for client in meta["clientDatas"]:
        client["cursor"]["postion"] |= {"journalName": file, "position": offset}
    (conf / "shop/meta.dat").write_text(json.dumps(meta))
    migration = Migration("canal")
    migrate_canal(conf, migration)
    migration.write(tmp_path / "new")
    settings: dict[str, Any] = yaml.safe_load((tmp_path / "new/penstock.yaml").read_text())
    settings["listen"] = {"canal": "127.0.0.1:0"}
    with DaemonProcess(tmp_path, settings) as daemon:
        server.sql("CREATE TABLE from_canal.t2 (id INT PRIMARY KEY); INSERT INTO from_canal.t2 VALUES (4)")
        server.sql("CREATE DATABASE not_from_canal; CREATE TABLE not_from_canal.t (id INT PRIMARY KEY)")
        server.sql("INSERT INTO not_from_canal.t VALUES (5)")
        arrived(server, daemon)
        with connect(daemon, 1001) as client:
            client.subscribe()
            assert drain(client) == ["3", "4"]
        with connect(daemon, 8) as client:
            # A new client also sees the instance's tables, from the start of the log.
            client.subscribe()
            assert {"1", "2", "3", "4"} <= set(drain(client))
        with connect(daemon, 9) as client:
            client.subscribe("not_from_canal\\..*")
            assert drain(client) == ["5"]


@pytest.mark.deep(guard="tests/unit/test_migrate_canal.py::test_producer_for_kafka_becomes_a_pipeline")
def test_producer_of_canal_continues_at_its_cursor(
    server: Server,
    broker: Kafka,  # noqa: F811
    tmp_path: Path,
) -> None:
    file, offset, *_ = next(event for event in table_with_rows(server, "from_canal") if event[2] == "Xid")
    address, user, password = account_of(server)
    instance = (
        f"canal.instance.master.address={address}\ncanal.instance.dbUsername={user}\n"
        f"canal.instance.dbPassword={password}\ncanal.instance.standby.address=\n"
        "canal.instance.filter.regex=from_canal\\\\..*\ncanal.mq.topic=from_canal\n"
    )
    kafka = f"canal.serverMode=kafka\nkafka.bootstrap.servers={broker.servers}\n"
    conf = copy_of_canal(tmp_path, server=kafka, instance=instance)
    meta = json.loads((conf / "shop/meta.dat").read_text())
    for client in meta["clientDatas"]:
        client["cursor"]["postion"] |= {"journalName": file, "position": offset}
    (conf / "shop/meta.dat").write_text(json.dumps(meta))
    migration = Migration("canal")
    migrate_canal(conf, migration)
    migration.write(tmp_path / "new")
    run_to_end(LocalDriver(), load_pipeline(tmp_path / "new/shop.yaml"))
    [record] = records(broker, "from_canal")
    assert (record.message["type"], record.message["data"]) == ("INSERT", [{"id": "3"}])


@pytest.mark.deep(guard="tests/unit/test_migrate_debezium.py::test_offset_becomes_the_start")
def test_pipeline_continues_at_the_connectors_offset(
    server: Server,
    broker: Kafka,  # noqa: F811
    tmp_path: Path,
) -> None:
    file, _, _, end = next(event for event in table_with_rows(server, "from_debezium") if event[2] == "Xid")
    address, user, password = account_of(server)
    config = {
        "connector.class": "io.debezium.connector.mysql.MySqlConnector",
        "database.hostname": address.partition(":")[0],
        "database.port": address.partition(":")[2],
        "database.user": user,
        "database.password": password,
        "topic.prefix": "shop",
        "database.include.list": "from_debezium",
        "value.converter": "org.apache.kafka.connect.json.JsonConverter",
        "value.converter.schemas.enable": "false",
        "schema.history.internal.kafka.bootstrap.servers": broker.servers,
    }
    (tmp_path / "connector.json").write_text(json.dumps({"name": "shop-connector", "config": config}))
    offset = {"partition": {"server": "shop"}, "offset": {"file": file, "pos": end, "row": 0, "event": 0}}
    (tmp_path / "offsets.json").write_text(json.dumps({"offsets": [offset]}))
    migration = Migration("debezium")
    migrate_debezium(tmp_path / "connector.json", migration, offsets=tmp_path / "offsets.json")
    migration.write(tmp_path / "new")
    run_to_end(LocalDriver(), load_pipeline(tmp_path / "new/pipeline.yaml"))
    [record] = records(broker, "shop.from_debezium.t")
    assert (record.message["op"], record.message["after"]) == ("c", {"id": 3})
    assert record.message["source"]["name"] == "shop"


@pytest.mark.deep(guard="tests/unit/test_migrate_maxwell.py::test_producer_for_kafka_becomes_a_pipeline")
def test_pipeline_continues_at_maxwells_position(
    server: Server,
    broker: Kafka,  # noqa: F811
    tmp_path: Path,
) -> None:
    file, _, _, end = next(event for event in table_with_rows(server, "from_maxwell") if event[2] == "Xid")
    server.sql(
        "CREATE DATABASE maxwell; CREATE TABLE maxwell.positions (server_id INT UNSIGNED, binlog_file"
        " VARCHAR(255), binlog_position INT UNSIGNED, gtid_set VARCHAR(4096), client_id VARCHAR(255),"
        " heartbeat_at BIGINT, last_heartbeat_read BIGINT, PRIMARY KEY (server_id, client_id));"
        f"INSERT INTO maxwell.positions VALUES (1, '{file}', {end}, NULL, 'shop', NULL, 1),"
        " (1, 'mysql-bin.000099', 4, NULL, 'another', NULL, 1)"
    )
    address, _, _ = account_of(server)
    host, _, port = address.partition(":")
    (tmp_path / "config.properties").write_text(
        f"producer=kafka\nkafka.bootstrap.servers={broker.servers}\nkafka_topic=%{{database}}\nhost={host}\n"
        f"port={port}\nuser=root\nclient_id=shop\nproducer_partition_by=primary_key\n"
        "filter=exclude: *.*, include: from_maxwell.*, include: maxwell.*\n"
    )
    migration = Migration("maxwell")
    migrate_maxwell(tmp_path / "config.properties", migration, from_server=True)
    migration.write(tmp_path / "new")
    run_to_end(LocalDriver(), load_pipeline(tmp_path / "new/maxwell.yaml"))
    [record] = records(broker, "from_maxwell")
    assert (record.message["type"], record.message["data"]) == ("insert", {"id": 3})


@pytest.mark.deep(guard="tests/unit/test_migrate_canal.py::test_cursors_become_checkpoints_of_the_clients")
def test_cursors_of_canal_are_read_from_zookeeper(zookeeper: ZooKeeper, tmp_path: Path) -> None:
    conf = copy_of_canal(tmp_path)
    meta = json.loads((conf / "shop/meta.dat").read_text())
    (conf / "shop/meta.dat").unlink()
    nodes = {
        f"/otter/canal/destinations/shop/{client['clientIdentity']['clientId']}/{name}": value
        for client in meta["clientDatas"]
        for name, value in (
            ("cursor", json.dumps(client["cursor"])),
            ("filter", client["clientIdentity"]["filter"]),
        )
    }
    with nodes_of(zookeeper, nodes):
        migration = Migration("canal")
        migrate_canal(conf, migration, zookeeper=zookeeper.hosts)
    cursors = {cursor.name: (cursor.checkpoint.position, cursor.filter) for cursor in migration.cursors}
    assert cursors == {
        "canal-1001": ("mysql-bin.000010:1542", ""),
        "canal-7": ("mysql-bin.000009:4711", "shop\\.orders"),
    }


@pytest.mark.deep(guard="tests/unit/test_migrate_ptubes.py::test_log_begins_before_the_oldest_storage_point")
def test_client_of_ptubes_continues_at_its_storage_point(
    server: Server, zookeeper: ZooKeeper, tmp_path: Path
) -> None:
    events = table_with_rows(server, "from_ptubes")
    file, offset, *_ = next(event for event in events if event[2] in ("Gtid", "Anonymous_Gtid"))
    [(_, _, _, server_id, _, gtid_next)] = server.sql(f"SHOW BINLOG EVENTS IN '{file}' FROM {offset} LIMIT 1")
    uuid, _, number = gtid_next.partition("'")[2].rstrip("'").partition(":")
    point = {
        "binlogFile": int(file.rpartition(".")[2]),
        "binlogOffset": offset,
        "checkpointMode": "NORMAL",
        "serverId": server_id,
        "uuid": uuid,
        "transactionId": int(number),
        "eventIndex": 0,
        "timestamp": 1,
        "versionTs": 0,
    }
    record = {"id": "0", "simpleFields": {"checkpoint": json.dumps(point)}}
    conf = tmp_path / "conf"
    shutil.copytree(ORIGINALS / "ptubes", conf)
    address, user, password = account_of(server)
    host, _, port = address.partition(":")
    (conf / "shop.properties").write_text(
        f"ptubes.reader.mysql.host={host}\nptubes.reader.mysql.port={port}\n"
        f"ptubes.reader.mysql.user={user}\nptubes.reader.mysql.passwd={password}\n"
        'ptubes.reader.mysql.subs={"from_ptubes.t":"id"}\n'
    )
    with nodes_of(zookeeper, {"/cache/PROPERTYSTORE/0_cache": json.dumps(record)}):
        migration = Migration("ptubes")
        migrate_ptubes(conf, migration, zookeeper=zookeeper.hosts)
    migration.write(tmp_path / "new")
    settings: dict[str, Any] = yaml.safe_load((tmp_path / "new/penstock.yaml").read_text())
    assert settings["instances"]["shop"]["start"] == f"{file}:4"
    settings["listen"] = {"ptubes": "127.0.0.1:0"}
    with DaemonProcess(tmp_path, settings) as daemon:
        arrived(server, daemon)
        with PtubesClient(daemon.ports["ptubes"], ["from_ptubes.t"]) as client:
            assert client.subscribe(point) == "success"
            client.fetch_until(lambda client: any(of_kind(client.events.get(0, []), INSERT)))
            [event] = of_kind(client.events[0], INSERT)
            assert event.rowData.afterColumns["id"].value == "3"


@pytest.mark.deep(guard="tests/unit/test_migrate_bifrost.py::test_target_of_mysql_becomes_a_mirror")
def test_pipeline_continues_at_bifrosts_position(server: Server, tmp_path: Path) -> None:
    file, _, _, end = next(event for event in table_with_rows(server, "from_bifrost") if event[2] == "Xid")
    address, user, password = account_of(server)
    document = json.loads((ORIGINALS / "bifrost/export.json").read_text())
    document["ToServer"]["warehouse"]["ConnUri"] = f"root@tcp({address})/test"
    source = document["DbInfo"]["shop"]
    source["ConnectUri"] = f"{user}:{password}@tcp({address})/mysql"
    [table, _] = source["TableMap"].values()
    [synchronisation, _] = table["ToServerList"]
    position = {
        "BinlogFileNum": int(file.rpartition(".")[2]),
        "BinlogPosition": end,
        "GTID": "",
        "EventID": 1,
    }
    parameters = synchronisation["PluginParam"] | {"Schema": "by_bifrost", "Table": "copy", "Field": []}
    synchronisation |= {
        "LastSuccessBinlog": position,
        "LastQueueBinlog": {**position, "EventID": 2},
        "PluginParam": parameters,
    }
    source |= {"TableMap": {"from_bifrost_-t": table | {"Name": "t", "ToServerList": [synchronisation]}}}
    source["BinlogDumpFileName"] = file
    (tmp_path / "export.json").write_text(json.dumps(document))
    migration = Migration("bifrost")
    migrate_bifrost(tmp_path / "export.json", migration)
    migration.write(tmp_path / "new")
    run_to_end(LocalDriver(), load_pipeline(tmp_path / "new/shop-warehouse.yaml"))
    assert server.sql("SELECT id FROM by_bifrost.copy") == [(3,)]


@contextmanager
def nodes_of(zookeeper: ZooKeeper, nodes: dict[str, str]) -> Iterator[None]:
    """Keep nodes in ZooKeeper inside the block, as another system would."""
    client = KazooClient(hosts=zookeeper.hosts)
    client.start(WAIT_SECONDS_MAX)
    try:
        for path, value in nodes.items():
            client.create(path, value.encode(), makepath=True)
        yield
        for path in nodes:
            client.delete(path)
    finally:
        client.stop()
        client.close()
