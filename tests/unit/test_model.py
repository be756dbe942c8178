# SPDX-License-Identifier: Apache-2.0
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.commit_versions import commit_version, epoch_base, next_epoch, shifted_epoch
from penstock.errors import LimitExceeded, OptionInvalid, PositionInvalid, SchemaInvalid
from penstock.gtid_sets import NO_GTIDS
from penstock.limits import (
    EPOCH_COUNTED_MAX,
    EPOCH_COUNTED_NEW_MAX,
    EPOCH_MAX,
    FILE_NUMBER_MAX,
    OFFSET_MAX,
)
from penstock.logstore.epochs import EpochFile, EpochRecord
from penstock.model import Column, Position, Secret, ServerAddress, TableName, TablePatterns, TableSchema, Tls

names = st.text(min_size=1, max_size=64).filter(lambda name: "\0" not in name)
positions = st.builds(
    lambda epoch, number, offset: Position(epoch, f"mysql-bin.{number:06d}", offset),
    st.one_of(st.integers(0, EPOCH_COUNTED_MAX), st.integers(1 << 30, EPOCH_MAX + 256 - FILE_NUMBER_MAX)),
    st.integers(0, FILE_NUMBER_MAX),
    st.integers(0, OFFSET_MAX),
)


@given(positions)
def test_position_round_trips_through_text(position: Position) -> None:
    assert Position.parse(str(position)) == position


@given(positions, positions)
def test_commit_versions_increase_with_positions(left: Position, right: Position) -> None:
    # Epochs of one log do not overlap: a later epoch begins above all file numbers of the earlier epochs.
    if left < right and epoch_base(right.epoch) - epoch_base(left.epoch) not in range(1, FILE_NUMBER_MAX):
        assert left.commit_version <= right.commit_version
        if left.file_number != right.file_number or right.offset - left.offset >= 16:
            assert left.commit_version < right.commit_version


def test_positions_are_ordered_by_number_and_not_by_text() -> None:
    assert Position(0, "bin.999999", 9) < Position(0, "bin.1000000", 4)
    assert Position(0, "zzz.000002", 4) < Position(0, "aaa.000003", 4)
    assert Position(0, "bin.000009", 4) < Position(1, "bin.000001", 4)


def test_commit_version_is_a_positive_int64_at_every_bound() -> None:
    assert commit_version(EPOCH_COUNTED_MAX, FILE_NUMBER_MAX, OFFSET_MAX) == (1 << 63) - 1
    assert commit_version(EPOCH_MAX + 256 - 7, 7, OFFSET_MAX) == (1 << 63) - 1
    for parts in [
        (EPOCH_MAX + 256, 1, 0),
        (-1, 0, 0),
        (0, FILE_NUMBER_MAX + 1, 0),
        (0, 0, OFFSET_MAX + 1),
        (0, 0, -1),
    ]:
        with pytest.raises(PositionInvalid):
            commit_version(*parts)


@given(
    st.integers(0, EPOCH_COUNTED_MAX),
    st.lists(st.tuples(st.integers(1, 30_000), st.integers(0, 500)), min_size=2, max_size=200),
    st.integers(-(1 << 31), 1 << 31),
)
def test_commit_versions_increase_over_any_number_of_epochs_and_map_back_to_their_files(
    first_epoch: int, files: list[tuple[int, int]], shift: int
) -> None:
    epochs, versions, places = [first_epoch], [], []
    for first, count in files:
        for number in (first, first + count):
            versions.append(commit_version(epochs[-1], number, 4))
            places.append((epochs[-1], number))
        epochs.append(next_epoch(epochs[-1], first + count))
    assert versions == sorted(versions)
    records = EpochFile(tuple(EpochRecord(epoch, "", 1, "", "", "", 4, NO_GTIDS, 0) for epoch in epochs))
    assert [records.decode_version(version) for version in versions] == places
    bases = [epoch_base(shifted_epoch(epoch, shift)) for epoch in epochs]
    assert bases == [epoch_base(epoch) + shift for epoch in epochs]
    assert [shifted_epoch(shifted_epoch(epoch, shift), -shift) for epoch in epochs] == epochs


def test_epochs_are_validated_first_and_end_with_the_last_commit_version() -> None:
    assert next_epoch(0, 5000) == 1
    assert next_epoch(EPOCH_COUNTED_NEW_MAX, 5000) == (EPOCH_COUNTED_NEW_MAX << 23) + 5001 + 256
    assert next_epoch(EPOCH_COUNTED_MAX, 17) == (EPOCH_COUNTED_MAX << 23) + 18 + 256
    with pytest.raises(LimitExceeded):
        next_epoch(EPOCH_MAX + 256 - 10, 10)


@pytest.mark.parametrize(
    "text", ["", "bin.000001", "bin:4", "bin.000001:", "bin.000001:-4", ":4", "x/bin.01:4"]
)
def test_invalid_position_is_refused(text: str) -> None:
    with pytest.raises(PositionInvalid):
        Position.parse(text)


@given(names, names)
def test_table_name_round_trips_through_text(database: str, table: str) -> None:
    name = TableName(database, table)
    assert TableName.parse(str(name)) == name


def test_name_may_start_with_a_unicode_blank() -> None:
    name = TableName("\u00a0a", "b\u3000")
    assert TableName.parse(str(name)) == name
    assert TablePatterns([str(name)]).matches("\u00a0a", "b\u3000")


def test_odd_names_are_written_in_backticks() -> None:
    assert str(TableName("shop", "orders")) == "shop.orders"
    assert str(TableName("my.db", "a`b c")) == "`my.db`.`a``b c`"
    for text in ["orders", "a.b.c", "a.", ".b", "a.`b"]:
        with pytest.raises(OptionInvalid):
            TableName.parse(text)


def test_table_schema_round_trips_through_json() -> None:
    columns = (Column("id", "int unsigned", None, False), Column("name", "varchar(20)", "utf8mb4"))
    schema = TableSchema("shop", "orders", columns, ("id",), 3)
    assert TableSchema.from_json(schema.to_json()) == schema
    assert pickle.loads(pickle.dumps(schema)) == schema


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"database": "a", "table": "b", "columns": []},
        {"database": "a", "table": "b", "columns": [["id", "int"]]},
        {"database": "a", "table": "b", "columns": [["id", "int", None, True]], "key": ["id"]},
    ],
)
def test_invalid_table_schema_is_refused(value: object) -> None:
    with pytest.raises(SchemaInvalid):
        TableSchema.from_json(value)


def test_patterns_select_by_wildcard_regular_expression_and_backticks() -> None:
    patterns = TablePatterns("shop.*, /crm_[0-9]+\\.(users|roles)/, `odd.db`.`we*rd`", ["shop.tmp_*"])
    assert patterns.matches("shop", "orders")
    assert patterns.matches("crm_12", "roles")
    assert patterns.matches("odd.db", "we*rd")
    assert not patterns.matches("shop", "tmp_orders")
    assert not patterns.matches("shop2", "orders")
    assert not patterns.matches("crm_12", "roles_old")
    assert not patterns.matches("odd.db", "weird")


def test_no_include_pattern_selects_every_table() -> None:
    assert TablePatterns().matches("any", "thing")
    assert not TablePatterns(exclude="mysql.*").matches("mysql", "user")


@given(names, names)
def test_quoted_name_as_a_pattern_selects_only_that_table(database: str, table: str) -> None:
    quoted = TableName(database, table).sql
    patterns = TablePatterns([quoted])
    assert patterns.matches(database, table)
    assert not patterns.matches(database, table + "x")
    assert patterns.single() == TableName(database, table)


def test_invalid_patterns_are_refused() -> None:
    for text in ["orders", "a.b.c", "/[/", "a.`b"]:
        with pytest.raises(OptionInvalid):
            TablePatterns([text])


def test_patterns_pickle_and_compare() -> None:
    patterns = TablePatterns(["a.*"], ["a.b"])
    again = pickle.loads(pickle.dumps(patterns))
    assert again == patterns
    assert again.matches("a", "c")
    assert not again.matches("a", "b")


def test_secret_never_prints_and_pickles_completely() -> None:
    secret = Secret("hunter2")
    assert "hunter2" not in f"{secret} {secret!r} {[secret]} {ServerAddress(password=secret)!r}"
    assert pickle.loads(pickle.dumps(secret)).reveal() == "hunter2"


def test_source_url_names_host_user_and_options() -> None:
    address = ServerAddress.parse(
        "mysql://re%40pl:p%3Aw%2F@[::1]:3307?ssl_mode=verify_ca&ssl_ca=/ca.pem&server_id=7"
    )
    assert (address.host, address.port, address.user, address.server_id) == ("::1", 3307, "re@pl", 7)
    assert address.password.reveal() == "p:w/"
    assert address.tls == Tls("verify_ca", "/ca.pem")
    assert str(address) == "mysql://re@pl@[::1]:3307"
    assert pickle.loads(pickle.dumps(address)) == address


def test_first_of_several_passwords_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_PASSWORD", "from-environment")
    file = tmp_path / "password"
    file.write_text("from-file\n")
    assert ServerAddress.parse("mysql://u@h").password.reveal() == "from-environment"
    assert ServerAddress.parse(f"mysql://u@h?password_file={file}").password.reveal() == "from-file"
    assert ServerAddress.parse(f"mysql://u:url@h?password_file={file}").password.reveal() == "url"
    assert ServerAddress.parse("mysql://u:url@h", password="option").password.reveal() == "option"


@pytest.mark.parametrize(
    "url",
    [
        "postgres://u@h",
        "mysql://u:secret@h:99999",
        "mysql://u:secret@h/shop",
        "mysql://u:top@secret@h/shop",
        "mysql://u:secret@h?ssl=1",
        "mysql://u:secret@h?ssl_mode=perhaps",
        "mysql://u:secret@h?server_id=0",
        "mysql://u:secret@h?server_id=x",
    ],
)
def test_invalid_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(OptionInvalid) as refused:
        ServerAddress.parse(url)
    assert "secret" not in str(refused.value)
