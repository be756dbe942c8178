# SPDX-License-Identifier: Apache-2.0
"""Character sets in a table map are assigned to the right columns, even if columns that are not text are in
between.
"""

import pytest

import penstock
from tests.support.suite.fixture_types import StartServer
from tools.servers import FLAVORS

COLUMNS = {
    "place": "POINT",
    "name": "VARCHAR(40) CHARACTER SET latin1",
    "shape": "GEOMETRY",
    "note": "TEXT CHARACTER SET utf8mb4",
    "raw": "VARBINARY(10)",
    "kind": "ENUM('a','é') CHARACTER SET utf8mb4",
    "code": "CHAR(5) CHARACTER SET gbk",
}
OWN_TYPES = {
    "mysql": {"embedding": "VECTOR(3)"},
    "mariadb": {},
    "mariadb11": {"id_text": "UUID", "six": "INET6", "four": "INET4", "embedding": "VECTOR(3)"},
}


@pytest.mark.parametrize("metadata", ["FULL", "MINIMAL"])
@pytest.mark.parametrize("flavor", FLAVORS)
def test_columns_between_texts_shift_no_character_set(
    start_server: StartServer, flavor: str, metadata: str
) -> None:
    server = start_server(flavor, binlog_row_metadata=metadata)
    # The server's own types precede the texts in the table map.
    columns = {**OWN_TYPES[flavor], **COLUMNS}
    declared = ", ".join(f"{name} {type_text}" for name, type_text in columns.items())
    server.sql(f"CREATE DATABASE d; CREATE TABLE d.t (id INT PRIMARY KEY, {declared})")
    server.sql(
        "INSERT INTO d.t (id, place, name, shape, note, raw, kind, code)"
        " VALUES (1, POINT(1, 2), 'né', POINT(3, 4), 'zoë', 'xyz', 'é', '汉')"
    )
    [batch] = penstock.read_binlog(server.url(), "d.t")
    [row] = batch.to_arrow().to_pylist()
    values = (row["name"], row["note"], row["raw"], row["kind"], row["code"])
    assert values == ("né", "zoë", b"xyz", "é", "汉")
