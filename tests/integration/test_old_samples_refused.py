# SPDX-License-Identifier: Apache-2.0
"""Unknown formats are rejected with an error that names them and gives a hint, and are never mistaken for
another format.

The tests modify samples of the newest version in the way that a later version might write them.
"""

import json
import sqlite3
import struct
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow
import pytest

import penstock as product
from penstock.coordinate.store import open_store
from penstock.errors import LogDamaged, OptionInvalid, PenstockError, SchemaInvalid
from penstock.logstore.epochs import seal_json
from penstock.logstore.records import BLOCKS_MAGIC, SEGMENTS_MAGIC, seal
from penstock.pipeline.dead_letter import dead_letters
from penstock.pipeline.record import BatchRecord
from penstock.pipeline.settings import load_pipeline
from penstock.settings.daemon import load_settings
from penstock.source.offsets import Offset
from penstock.source.tracking import TrackedSchemas
from penstock.spark.options import parse_settings
from tests.samples.reading import VERSIONS, Sample, row_changes
from tests.samples.shop import ORDERS
from tests.support.logstore.kept_log import penstock
from tools.servers.ports import free_port


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    return Sample.copy(VERSIONS[-1], tmp_path / "sample")


def only_file(folder: Path, pattern: str) -> Path:
    """Return the single file that matches a pattern."""
    (path,) = folder.glob(pattern)
    return path


def decode(sample: Sample) -> list[Any]:
    """Return the decoded changes of orders in the log."""
    batches = product.read_binlog(sample.log, tables=ORDERS)
    return row_changes([row for batch in batches for row in batch.to_arrow().to_pylist()])


def assert_says_what_to_do(problem: PenstockError, *words: str) -> None:
    """Assert that an error has a hint that contains some words."""
    assert problem.hint is not None, problem
    missing = [word for word in words if word not in problem.hint]
    assert not missing, (missing, problem.hint)


# --- Logs -----------------------------------------------------------------------------------


def test_definitions_of_another_format_are_refused(sample: Sample) -> None:
    path = only_file(sample.log / "schemas", "*.schemas")
    first, rest = path.read_bytes().split(b"\n", 1)
    text = json.dumps({**json.loads(first[9:]), "format": 2}).encode()
    path.write_bytes(b"%08x %b\n" % (zlib.crc32(text), text) + rest)
    with pytest.raises(SchemaInvalid, match="has format 2, this program reads 1") as refused:
        decode(sample)
    assert str(path) in refused.value.message
    assert_says_what_to_do(refused.value, "version of penstock that wrote it")


def test_epochs_with_unknown_fields_are_refused(sample: Sample) -> None:
    path = sample.log / "epochs.json"
    values = json.loads(path.read_text())
    epochs = [{**epoch, "cluster": "north"} for epoch in values["epochs"]]
    assert epochs
    path.write_bytes(seal_json({"epochs": epochs}))
    with pytest.raises(LogDamaged, match=r"epochs\.json is not what was written") as refused:
        decode(sample)
    assert_says_what_to_do(refused.value, "Restore the file")


@pytest.mark.parametrize(
    ("pattern", "magic", "kind"),
    [("segments.index", SEGMENTS_MAGIC, "segments"), ("*/*.index", BLOCKS_MAGIC, "blocks")],
)
def test_index_of_another_version_is_named_and_rebuilt_from_the_data(
    sample: Sample, pattern: str, magic: bytes, kind: str
) -> None:
    before, paths = decode(sample), sorted(sample.log.glob(pattern))
    assert paths
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(magic)
        later = magic[:-1] + bytes([magic[-1] + 1])
        path.write_bytes(seal(later + content[len(magic) : 124]) + content[128:])
    assert decode(sample) == before
    verified = penstock("log", "verify", sample.log, "--json")
    assert verified.code == 1
    assert {finding["kind"] for finding in verified.objects} == {kind}
    assert all(finding["mend"] for finding in verified.objects)
    assert penstock("log", "verify", sample.log, "--heal").code == 0
    assert penstock("log", "verify", sample.log).code == 0


def test_cold_segment_with_an_unknown_seek_table_is_refused(sample: Sample) -> None:
    path = only_file(sample.log, "*/*.zst")
    content = bytearray(path.read_bytes())
    frames, flags, magic = struct.unpack_from("<IBI", content, len(content) - 9)
    struct.pack_into("<IBI", content, len(content) - 9, frames, flags | 0x40, magic)
    path.write_bytes(content)
    with pytest.raises(PenstockError, match="seek table") as refused:
        decode(sample)
    assert path.name.partition(".")[0] in f"{refused.value} {refused.value.position}"


# --- State that readers store ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["coordination/running.db", "coordination/resized.db", "pipelines/pipelines.db"]
)
def test_coordination_file_of_another_format_is_refused(sample: Sample, name: str) -> None:
    path = sample.folder / name
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        connection.execute("PRAGMA user_version = 2")
    with pytest.raises(OptionInvalid, match=r"has format 2, not 1") as refused:
        open_store(f"sqlite://{path}")
    assert str(path) in refused.value.message
    assert_says_what_to_do(refused.value, "Run the Penstock that wrote it")


def test_offset_with_unknown_fields_is_refused(sample: Sample) -> None:
    with pytest.raises(OptionInvalid, match="is not an offset") as refused:
        Offset.from_json({**sample.offset(1), "version": 2})
    assert '"version": 2' in refused.value.message
    assert_says_what_to_do(refused.value, "Write {")


def test_tracked_schemas_of_another_format_are_refused(sample: Sample) -> None:
    path = sample.folder / "spark/server/tracking/schemas.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "history": {**saved["history"], "format": 2}}))
    source = f"mysql://repl@127.0.0.1:{free_port()}"
    settings = parse_settings(
        {"source": source, "tables": ORDERS, "schemaTrackingLocation": str(path.parent)}
    )
    with pytest.raises(SchemaInvalid, match="has format 2, this program reads 1"):
        TrackedSchemas.open(settings)
    path.write_text(json.dumps({**saved, "version": 2}))
    with pytest.raises(SchemaInvalid, match="is no schema tracking file") as refused:
        TrackedSchemas.open(settings)
    assert_says_what_to_do(refused.value, "schemaTrackingLocation")


@pytest.mark.parametrize(
    "change",
    [lambda batch: batch.pop("parts"), lambda batch: batch["ranges"][0].update(range={"from": 1, "to": 2})],
    ids=["missing", "renamed"],
)
def test_started_batch_of_another_version_is_refused(sample: Sample, change: Callable[..., Any]) -> None:
    with closing(sqlite3.connect(sample.folder / "pipelines/pipelines.db")) as connection:
        (value,) = connection.execute(
            "SELECT value FROM records WHERE path = '/pipelines/shop-feed/batch'"
        ).fetchone()
    batch = json.loads(zlib.decompress(value[1:]))
    assert BatchRecord.from_json(batch).number == batch["number"]
    change(batch)
    with pytest.raises(SchemaInvalid, match="the batch that was begun cannot be read") as refused:
        BatchRecord.from_json(batch)
    assert_says_what_to_do(refused.value, "the version that began it", "penstock pipelines reset")


def test_dead_letter_without_its_mark_is_refused(sample: Sample) -> None:
    lake = sample.pipeline("shop-lake")
    path = sorted((sample.folder / "pipelines/dead_letter").glob("*.arrow"))[0]
    rows = pyarrow.ipc.open_file(path.read_bytes()).read_all().replace_schema_metadata({"penstock2": "{}"})
    with pyarrow.ipc.new_file(str(path), rows.schema) as writer:
        writer.write_table(rows)
    with pytest.raises(SchemaInvalid, match="is no entry of a dead letter") as refused:
        dead_letters(lake)
    assert path.name in refused.value.message


@pytest.mark.parametrize(
    ("name", "load", "known"),
    [("penstock", load_settings, "listen"), ("pipeline", load_pipeline, "batch")],
)
def test_settings_file_with_an_unknown_section_is_refused(
    sample: Sample, name: str, load: Callable[..., Any], known: str
) -> None:
    path = sample.folder / f"settings/{name}.yaml"
    text = path.read_text()
    assert f"\n{known}:" in text
    path.write_text(text.replace(f"\n{known}:", f"\n{known}s:"))
    environment = {"TOKEN": "t", "PASSWORD": "p", "CACHE_TOKEN": "c", "FOLDER": str(path.parent)}
    with pytest.raises(OptionInvalid) as refused:
        load(path, environment)
    whole_text = f"{refused.value.message} {refused.value.hint}"
    assert f"{known}s" in whole_text
    assert "unknown" in whole_text
    assert path.name in whole_text
