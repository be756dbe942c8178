# SPDX-License-Identifier: Apache-2.0
"""List the files of a log."""

from pathlib import Path

import pytest

from penstock.errors import OptionInvalid, SequenceGap, SourceMissing
from penstock.source.listing import check_sequence, list_files


def _make(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"\xfebin")
    return folder


def _names(*paths: str) -> list[str]:
    return [located.file for located in list_files(paths)]


def test_folder_is_read_in_numeric_order(tmp_path: Path) -> None:
    _make(tmp_path, "bin.1000000", "bin.999999", "bin.000002")
    assert _names(str(tmp_path)) == ["bin.000002", "bin.999999", "bin.1000000"]


def test_index_files_and_files_without_a_number_are_skipped(tmp_path: Path) -> None:
    _make(tmp_path, "bin.000001", "bin.000001.idx", "bin.index", "ibdata1", "error.log", "error.log.1")
    assert _names(str(tmp_path)) == ["bin.000001"]
    assert _names(str(tmp_path / "bin.*")) == ["bin.000001"]


def test_compressed_files_are_recognized_by_their_original_name(tmp_path: Path) -> None:
    _make(tmp_path, "bin.000001.gz", "bin.000002.zst", "bin.000003")
    located = list_files((str(tmp_path),))
    assert [(extent.file, extent.compression) for extent in located] == [
        ("bin.000001", "gz"),
        ("bin.000002", "zst"),
        ("bin.000003", None),
    ]


def test_plain_file_is_preferred_to_its_compressed_copy(tmp_path: Path) -> None:
    _make(tmp_path, "bin.000001", "bin.000001.gz")
    assert [list_file.compression for list_file in list_files((str(tmp_path),))] == [None]


def test_folder_with_two_logs_is_refused_and_both_are_named(tmp_path: Path) -> None:
    _make(tmp_path, "bin.000001", "relay.000001")
    with pytest.raises(OptionInvalid, match="bin, relay") as caught:
        list_files((str(tmp_path),))
    assert str(tmp_path / "bin.*") in str(caught.value.hint)


def test_numbered_files_that_are_not_binlogs_are_skipped(tmp_path: Path) -> None:
    _make(tmp_path, "bin.000001", "bin.000002")
    (tmp_path / "aria_log.00000001").write_bytes(b"\xfe\xfe\xf0\x01")
    assert _names(str(tmp_path)) == ["bin.000001", "bin.000002"]


def test_renamed_log_is_continuous_if_both_parts_are_named(tmp_path: Path) -> None:
    _make(tmp_path, "old.000001", "new.000002")
    assert _names(str(tmp_path / "old.*"), str(tmp_path / "new.*")) == ["old.000001", "new.000002"]


def test_two_files_with_one_number_are_refused(tmp_path: Path) -> None:
    _make(tmp_path, "one.000001", "two.000001")
    with pytest.raises(OptionInvalid):
        list_files((str(tmp_path / "one.000001"), str(tmp_path / "two.000001")))


def test_same_name_in_two_folders_is_refused(tmp_path: Path) -> None:
    _make(tmp_path / "a", "bin.000001")
    _make(tmp_path / "b", "bin.000001")
    with pytest.raises(OptionInvalid):
        list_files((str(tmp_path / "a"), str(tmp_path / "b")))


def test_repeated_file_is_read_once(tmp_path: Path) -> None:
    _make(tmp_path, "bin.000001", "bin.000002")
    assert _names(str(tmp_path / "bin.000001"), str(tmp_path)) == ["bin.000001", "bin.000002"]


def test_single_file_needs_no_number(tmp_path: Path) -> None:
    _make(tmp_path, "orders.binlog")
    located = list_files((str(tmp_path / "orders.binlog"),))
    assert [(extent.file, extent.number) for extent in located] == [("orders.binlog", 0)]
    _make(tmp_path, "items.binlog")
    with pytest.raises(OptionInvalid):
        list_files((str(tmp_path / "*.binlog"),))


@pytest.mark.parametrize("text", ["nothing.000001", "nothing.*", "."])
def test_source_without_files_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(SourceMissing) as caught:
        list_files((str(tmp_path / text),))
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint


def test_gap_in_the_sequence_names_the_missing_file(tmp_path: Path) -> None:
    _make(tmp_path, "bin.000008", "bin.000009", "bin.000011")
    with pytest.raises(SequenceGap, match=r"bin\.000010 is missing") as caught:
        check_sequence(list_files((str(tmp_path),)))
    assert caught.value.position is not None
    assert "bin.000010" in str(caught.value.hint)
