# SPDX-License-Identifier: Apache-2.0
"""No collation of a server treats two texts in different groups as equal."""

from collections import defaultdict

import pyarrow
import pytest

from penstock import _native
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

# For each family some collations of every kind: old and new weights, country-specific, padded or not.
COLLATIONS = {
    "mysql": [
        "utf8mb4_general_ci",
        "utf8mb4_unicode_ci",
        "utf8mb4_unicode_520_ci",
        "utf8mb4_0900_ai_ci",
        "utf8mb4_0900_as_cs",
        "utf8mb4_swedish_ci",
        "utf8mb4_danish_ci",
        "utf8mb4_german2_ci",
        "utf8mb4_lithuanian_ci",
        "utf8mb4_roman_ci",
        "utf8mb4_spanish2_ci",
        "utf8mb4_turkish_ci",
        "utf8mb4_ja_0900_as_cs",
        "utf8mb4_de_pb_0900_ai_ci",
    ],
    "mariadb": [
        "utf8mb4_general_ci",
        "utf8mb4_unicode_ci",
        "utf8mb4_unicode_nopad_ci",
        "utf8mb4_uca1400_ai_ci",
    ],
}
PAIRS = ("aa", "ae", "oe", "ue", "ss", "th", "ij", "dz", "lj", "nj", "st", "ff", "fi", "fl", "  ", "a ", " a")


@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_values_equal_under_a_collation_are_in_one_group(
    flavor: str, mysql_server: Server, mariadb_server: Server
) -> None:
    server = mysql_server if flavor == "mysql" else mariadb_server
    letters = [chr(code) for code in range(32, 0x3000) if not 0xD800 <= code < 0xE000]
    written = [*letters, *PAIRS, "\U0001f600", "\U0001f6b0", "\U0001d400", "日", "本"]
    known = {row[0] for row in server.sql("SHOW COLLATION WHERE Charset = 'utf8mb4'")}
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION group_concat_max_len = 1000000")
        cursor.execute(
            "CREATE TEMPORARY TABLE mysql.letters (number INT, text VARCHAR(9) CHARACTER SET utf8mb4)"
        )
        rows = list(enumerate(written))
        for first in range(0, len(rows), 2000):
            cursor.executemany("INSERT INTO mysql.letters VALUES (%s, %s)", rows[first : first + 2000])
        parted = {}
        for collation in [name for name in COLLATIONS[flavor] if name in known]:
            cursor.execute(f"SELECT number, WEIGHT_STRING(text COLLATE {collation}) FROM mysql.letters")
            same: dict[bytes, list[str]] = defaultdict(list)
            for number, weight in cursor.fetchall():
                same[weight].append(written[number])
            split_groups = [texts for texts in same.values() if len(texts) > 1 and apart(texts)]
            if split_groups:
                parted[collation] = (len(split_groups), split_groups[:5])
        assert not parted


def apart(texts: list[str]) -> bool:
    """Return whether some of the texts are certainly in different groups."""
    rows = pyarrow.RecordBatch.from_pydict({"text": pyarrow.array(texts)})
    return len(set(pyarrow.array(_native.key_groups(rows, [["text"]])).to_pylist())) > 1
