# SPDX-License-Identifier: Apache-2.0
"""Write the kernel's character set tables by asking real servers.

    python -m tools.charsets

Codecs of other libraries share their names with MySQL's character sets, but not their mappings. A running
MySQL therefore converts each code of each character set, and the answers become the tables of
`native/kernel/src/charset/`:

- `pages.bin`: all distinct pages. A page maps one byte to 16 bits, 0 meaning none. It is stored as its first
  and last used byte, then one little-endian 16-bit value for each byte between them; an empty page is the
  bytes 1, 0.
- `tables.rs`: the page at which a character set starts, and the four-byte ranges of gb18030.
- `collations.rs`: collation id to character set, of MySQL and MariaDB together.

A code is kept if the server accepts it as a single character and converts it to a Unicode character. MariaDB
converts the same codes. The tables contain MySQL's mapping, and the program prints every code for which
MariaDB disagrees. A run takes half a minute. Facts: MySQL manual, "Character Sets, Collations, Unicode".
"""

import itertools
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pymysql.cursors import Cursor

from tools.servers import Server

CHARSET_DIRECTORY = Path(__file__).resolve().parents[1] / "native" / "kernel" / "src" / "charset"
GENERATED = (
    "// Written by `python -m tools.charsets` from the answers of real servers; edit that, not this.\n\n"
)

SINGLE_BYTE = (
    "armscii8 cp1250 cp1251 cp1256 cp1257 cp850 cp852 cp866 dec8 geostd8 greek hebrew hp8 keybcs2 koi8r "
    "koi8u latin1 latin2 latin5 latin7 macce macroman swe7 tis620"
).split()
MULTIBYTE = "big5 cp932 eucjpms euckr gb18030 gb2312 gbk sjis ujis".split()
COMPUTED = "ascii binary ucs2 utf16 utf16le utf32 utf8mb3 utf8mb4".split()

ALL_BYTES = range(0x100)
HIGH_BYTES = range(0x80, 0x100)
THREE_BYTE_LEAD = 0x8F
GB18030_SHAPE = (range(0x81, 0xFF), range(0x30, 0x3A), range(0x81, 0xFF), range(0x30, 0x3A))
UNCONVERTIBLE = "0000003F"

Mapping = dict[bytes, int]


@dataclass
class Pages:
    """Distinct pages, in the order of their first use. Page 0 is empty."""

    rows: list[tuple[int, ...]] = field(default_factory=lambda: [(0,) * 256])

    def number_of(self, values: dict[int, int]) -> int:
        """Return the number of the page that holds `values` (byte to 16 bits), adding it if it is new."""
        row = tuple(values.get(byte, 0) for byte in ALL_BYTES)
        if row not in self.rows:
            self.rows.append(row)
        return self.rows.index(row)

    def encoded(self) -> bytes:
        """Return the bytes of `pages.bin`."""
        out = bytearray()
        for row in self.rows:
            used = [byte for byte, value in enumerate(row) if value]
            first, last = (used[0], used[-1]) if used else (1, 0)
            out += bytes((first, last))
            for value in row[first : last + 1]:
                out += value.to_bytes(2, "little")
        return bytes(out)


def cursor_of(server: Server) -> Cursor:
    """Return a cursor of `server`, in a mode in which an invalid sequence returns a value, not an error."""
    cursor: Cursor = server.connect().cursor()
    cursor.execute("SET sql_mode = '', group_concat_max_len = 1000000")
    return cursor


def octets_in(values: Sequence[int]) -> str:
    """Return a derived table of one column `n` that holds `values`."""
    return "(" + " UNION ALL ".join(f"SELECT {value} AS n" for value in values) + ")"


def ask(
    cursor: Cursor, charset: str, shape: Sequence[Sequence[int]], target: str = "utf32"
) -> Iterator[tuple[bytes, str]]:
    """Convert every byte sequence of `shape` (the bytes allowed at each index) from `charset` to `target`.

    Yields each sequence with the server's result in hexadecimal. The result is empty if MySQL truncates a
    malformed text. MariaDB returns question marks instead, as both servers do for a character that `target`
    does not have.
    """
    names = "abcd"[: len(shape)]
    code = "CONCAT(" + ", ".join(f"CHAR({name}.n)" for name in names) + ")"
    text = f"CONVERT({code} USING {charset})"
    answer = f"IF(LENGTH({text}) = {len(shape)}, HEX(CONVERT({text} USING {target})), '')"
    order = ", ".join(f"{name}.n" for name in names)
    tails = list(itertools.product(*shape[1:]))
    # Limit the values of one statement to 65,536, so that they fit into GROUP_CONCAT.
    seconds = [[second] for second in shape[1]] if len(shape) > 2 else shape[1:2]
    for lead in shape[0]:
        answers: list[str] = []
        for second in [[part] for part in seconds] or [[]]:
            octet_tables = [octets_in(octets) for octets in ([lead], *second, *shape[2:])]
            tables = ", ".join(
                f"{octet_table} AS {name}" for octet_table, name in zip(octet_tables, names, strict=True)
            )
            cursor.execute(f"SELECT GROUP_CONCAT({answer} ORDER BY {order}) FROM {tables}")
            answers += str(cursor.fetchall()[0][0]).split(",")
        for tail, answered in zip(tails, answers, strict=True):
            yield bytes((lead, *tail)), answered


def shapes_of(charset: str) -> list[tuple[Sequence[int], ...]]:
    """Return the shapes of all sequences that can be one character of `charset`."""
    shapes: list[tuple[Sequence[int], ...]] = [(ALL_BYTES,)]
    if charset in MULTIBYTE:
        shapes.append((HIGH_BYTES, ALL_BYTES))
    if charset in ("eucjpms", "ujis"):
        shapes.append(((THREE_BYTE_LEAD,), ALL_BYTES, ALL_BYTES))
    if charset == "gb18030":
        shapes.append(GB18030_SHAPE)
    return shapes


def mapping_of(cursor: Cursor, charset: str) -> Mapping:
    """Return every code of `charset` with the Unicode character to which the server converts it."""
    mapping: Mapping = {}
    for shape in shapes_of(charset):
        for code, unicode in ask(cursor, charset, shape):
            if len(unicode) == 8 and (unicode != UNCONVERTIBLE or code == b"?"):
                mapping[code] = int(unicode, 16)
    check_decodable(charset, mapping)
    return mapping


def check_decodable(charset: str, mapping: Mapping) -> None:
    """Stop if a code is a prefix of another code, or if an answer is not a character that UTF-8 can
    encode.
    """
    for code, unicode in mapping.items():
        if any(code[:length] in mapping for length in range(1, len(code))):
            raise SystemExit(f"{charset}: a shorter code begins {code.hex()}")
        if 0xD800 <= unicode <= 0xDFFF or (unicode == 0) != (code == b"\0"):
            raise SystemExit(f"{charset}: {code.hex()} became U+{unicode:04X}")
        if unicode > 0xFFFF and len(code) < 4:
            raise SystemExit(f"{charset}: {code.hex()} became U+{unicode:04X}, more than a page holds")


def page_below(pages: Pages, mapping: Mapping, prefix: bytes) -> int:
    """Return the page of all codes that consist of `prefix` and one more byte."""
    return pages.number_of({code[-1]: to for code, to in mapping.items() if code[:-1] == prefix})


def entry_of(pages: Pages, charset: str, mapping: Mapping) -> str:
    """Add the pages of one character set and return its Rust entry."""
    short = {code: to for code, to in mapping.items() if len(code) <= 2}
    single = page_below(pages, short, b"")
    if charset in SINGLE_BYTE:
        return f"pub(super) const {charset.upper()}: usize = {single};\n"
    leads = sorted({code[0] for code in short if len(code) == 2})
    second = pages.number_of({lead: page_below(pages, short, bytes((lead,))) for lead in leads})
    return (
        f"pub(super) const {charset.upper()}: MultibytePages = MultibytePages {{ "
        f"single: {single}, second: {second}, longer: {longer_of(pages, mapping)} }};\n"
    )


def longer_of(pages: Pages, mapping: Mapping) -> str:
    """Add the pages of three-byte codes and return the Rust words for the codes longer than two bytes."""
    lengths = {len(code) for code in mapping}
    if 4 in lengths:
        return "Longer::Four"
    if 3 not in lengths:
        return "Longer::None"
    long = {code: to for code, to in mapping.items() if len(code) == 3}
    rows = sorted({code[1] for code in long})
    third = pages.number_of({row: page_below(pages, long, bytes((THREE_BYTE_LEAD, row))) for row in rows})
    return f"Longer::Three({third})"


def linear_of(code: bytes) -> int:
    """Return the index of a four-byte code of gb18030 among all codes of its shape."""
    return (((code[0] - 0x81) * 10 + code[1] - 0x30) * 126 + code[2] - 0x81) * 10 + code[3] - 0x30


def ranges_of(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Join sorted (from, to) pairs in which both numbers increase by one into (first from, first to,
    count).
    """
    ranges: list[tuple[int, int, int]] = []
    for source, target in pairs:
        if ranges:
            first, start, count = ranges[-1]
            if (source, target) == (first + count, start + count):
                ranges[-1] = (first, start, count + 1)
                continue
        ranges.append((source, target, 1))
    return ranges


def write_tables(mappings: dict[str, Mapping]) -> None:
    """Write `pages.bin` and `tables.rs`."""
    pages = Pages()
    entries = [entry_of(pages, charset, mapping) for charset, mapping in sorted(mappings.items())]
    four_bytes = sorted((linear_of(code), to) for code, to in mappings["gb18030"].items() if len(code) == 4)
    ranges = ranges_of(four_bytes)
    source = GENERATED + "use super::layout::{Longer, MultibytePages};\n\n"
    source += f"pub(super) const PAGE_COUNT: usize = {len(pages.rows)};\n\n" + "".join(entries)
    source += (
        "\n/// The first code's place in the four-byte codes, its character, and how many follow in step.\n"
    )
    source += f"pub(super) const GB18030_RANGES: [(u32, u32, u32); {len(ranges)}] = [\n"
    source += "".join(f"({first}, {start:#x}, {count}),\n" for first, start, count in ranges) + "];\n"
    (CHARSET_DIRECTORY / "pages.bin").write_bytes(pages.encoded())
    write_rust(CHARSET_DIRECTORY / "tables.rs", source)


def collations_of(cursor: Cursor, query: str) -> dict[int, str]:
    """Return collation id to character set name, as `query` returns them."""
    cursor.execute(query)
    return {int(identifier): str(charset) for identifier, charset in cursor.fetchall()}


def write_collations(mysql: Cursor, mariadb: Cursor) -> None:
    """Write `collations.rs`; stop if an id has two character sets."""
    mysql_collations = collations_of(
        mysql, "SELECT ID, CHARACTER_SET_NAME FROM information_schema.COLLATIONS"
    )
    mariadb_collations = collations_of(
        mariadb, "SELECT ID, CHARACTER_SET_NAME FROM information_schema.COLLATION_CHARACTER_SET_APPLICABILITY"
    )
    clashes = {
        number
        for number in mysql_collations.keys() & mariadb_collations.keys()
        if mysql_collations[number] != mariadb_collations[number]
    }
    if clashes:
        raise SystemExit(f"collation ids that mean two character sets: {sorted(clashes)}")
    ranges: list[tuple[int, int, str]] = []
    for number, charset in sorted((mysql_collations | mariadb_collations).items()):
        if ranges and ranges[-1][1:] == (number - 1, charset):
            ranges[-1] = (ranges[-1][0], number, charset)
        else:
            ranges.append((number, number, charset))
    source = GENERATED + "use super::sets::Charset;\n\n"
    source += "/// First and last collation id of a run, and the character set of all of them; sorted.\n"
    source += f"pub(super) const COLLATIONS: [(u32, u32, Charset); {len(ranges)}] = [\n"
    source += "".join(f"({a}, {b}, Charset::{charset.capitalize()}),\n" for a, b, charset in ranges) + "];\n"
    write_rust(CHARSET_DIRECTORY / "collations.rs", source)


def write_rust(path: Path, source: str) -> None:
    """Write `source`, formatted."""
    path.write_text(source)
    subprocess.run(["rustfmt", "--edition", "2021", str(path)], check=True)


def compare(charset: str, mysql_mapping: Mapping, mariadb_mapping: Mapping) -> None:
    """Print how MariaDB's mapping of `charset` differs from MySQL's."""
    differing = sorted(
        code
        for code in mysql_mapping.keys() | mariadb_mapping.keys()
        if mysql_mapping.get(code) != mariadb_mapping.get(code)
    )
    print(f"{charset}: {len(mysql_mapping)} codes, {len(differing)} differ in MariaDB")
    for code in differing[:20]:
        mysql_text, mariadb_text = (
            f"U+{side[code]:04X}" if code in side else "none" for side in (mysql_mapping, mariadb_mapping)
        )
        print(f"  {code.hex().upper()}: MySQL {mysql_text}, MariaDB {mariadb_text}")


def names_of(cursor: Cursor) -> set[str]:
    """Return the names of the server's character sets."""
    cursor.execute("SELECT CHARACTER_SET_NAME FROM information_schema.CHARACTER_SETS")
    return {str(name) for (name,) in cursor.fetchall()}


def write(mysql: Cursor, mariadb: Cursor) -> None:
    """Ask both servers, write all tables, print the differences."""
    unknown = names_of(mysql) ^ {*SINGLE_BYTE, *MULTIBYTE, *COMPUTED}
    if unknown:
        raise SystemExit(f"the server's character sets and this program's differ: {sorted(unknown)}")
    mappings = {charset: mapping_of(mysql, charset) for charset in (*SINGLE_BYTE, *MULTIBYTE)}
    write_tables(mappings)
    write_collations(mysql, mariadb)
    shared = names_of(mariadb)
    for charset, mapping in mappings.items():
        if charset in shared:
            compare(charset, mapping, mapping_of(mariadb, charset))
        else:
            print(f"{charset}: {len(mapping)} codes; MariaDB has no such character set")


if __name__ == "__main__":
    with Server("mysql") as mysql_server, Server("mariadb11") as mariadb_server:
        write(cursor_of(mysql_server), cursor_of(mariadb_server))
