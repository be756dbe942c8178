# SPDX-License-Identifier: Apache-2.0
"""`penstock demo`: decode a sample log, run a pipeline on it, and check that the target equals the source."""

import gzip
import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

import penstock
from penstock.cli.shared.rendering import Field, LineWriter, bytes_text, counted
from penstock.errors import OptionInvalid

EXIT_DIFFERENCES = 1

_SAMPLE = Path(penstock.__file__).with_name("sample")
_LOG = "mysql-bin.000001"
_TABLE = "shop.orders"
_SHOWN_ROWS = 6
_SHOWN_COLUMNS = (
    Field("_change_type", 16),
    Field("id", 10, right=True),
    Field("customer", 14),
    Field("status", 8),
    Field("total", 9, right=True),
    Field("placed_at", 26),
)
_PIPELINE = """\
# Written by `penstock demo`. A pipeline of your own names a server: url: mysql://repl@db1:3306
name: demo
source: {{name: shop, path: {log}, tables: [shop.*]}}
load: {{mode: none}}
sink: {{files: {{path: {feed}}}}}
state: sqlite://{state}
"""

Row = Mapping[str, str | None]


def run(
    directory: Annotated[
        Path, typer.Argument(help="The folder for the log, the pipeline file and the Parquet files.")
    ] = Path("penstock-demo"),
) -> None:
    """Decode a sample log, write its changes as Parquet files, and compare them with the server's rows.

    Needs no server, Spark or Java. A MySQL server wrote the log, and its SELECT returned the rows. Exits with
    1 if a row differs.
    """
    sample = json.loads(gzip.decompress((_SAMPLE / "rows.json.gz").read_bytes()))
    file = _prepare(directory)
    log = directory / _LOG
    typer.echo(f"1. The log: {log}, {bytes_text(log.stat().st_size)}, written by {sample['server']}\n")
    _decode(log)
    typer.echo(f"\n2. The pipeline: penstock run {file} --local --until caught-up\n")
    _run_pipeline(file)
    typer.echo("\n3. The proof: the rows of the Parquet files, compared with SELECT on the server\n")
    differing = 0
    for table, keys in sample["keys"].items():
        differing += _compare(f"shop.{table}", directory / "feed" / "shop" / table, keys, sample["tables"])
    if differing:
        raise typer.Exit(EXIT_DIFFERENCES)
    typer.echo(
        f"\nNext: penstock inspect {log} --rows --tables {_TABLE} --limit 20"
        "\n      PENSTOCK_PASSWORD=... penstock check mysql://USER@HOST:3306    (a server of your own)"
    )


def _prepare(directory: Path) -> Path:
    """Write the log and a pipeline file into an empty folder, or into the folder of an earlier demo.

    Deletes only what an earlier demo wrote. Raises OptionInvalid for other folders, and if the pipeline file
    was edited.
    """
    log, file = directory / _LOG, directory / "pipeline.yaml"
    original = (_SAMPLE / _LOG).read_bytes()
    names = {"log": _LOG, "feed": "feed", "state": "state.db"}
    paths = {name: directory.absolute() / path for name, path in names.items()}
    pipeline = _PIPELINE.format(**paths)
    hint = "Name a new folder: penstock demo /tmp/penstock-demo"
    if directory.exists() and any(directory.iterdir()):
        if not (log.is_file() and log.read_bytes() == original):
            raise OptionInvalid(f"{directory} is not empty", hint=hint)
        if file.exists() and file.read_text() != pipeline:
            raise OptionInvalid(f"{file} is not as the demo wrote it, and would be lost", hint=hint)
        if paths["feed"].exists():
            shutil.rmtree(paths["feed"])
        for suffix in ("", "-wal", "-shm"):
            paths["state"].with_name(f"state.db{suffix}").unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    log.write_bytes(original)
    file.write_text(pipeline)
    return file


def _decode(log: Path) -> None:
    """Show the first changes of one table, and count the changes of all tables."""
    read_binlog = penstock.read_binlog  # imported before the clock starts
    began, changes, tables = time.monotonic(), 0, set()
    shown: list[Mapping[str, Any]] = []
    for batch in read_binlog(str(log)):
        changes += len(batch)
        tables.add(str(batch.table))
        if str(batch.table) == _TABLE and len(shown) < _SHOWN_ROWS:
            shown += batch.to_arrow().slice(0, _SHOWN_ROWS - len(shown)).to_pylist()
    seconds = time.monotonic() - began
    lines = LineWriter(sys.stdout, _SHOWN_COLUMNS)
    for row in shown:
        lines.write([row[field.name] for field in _SHOWN_COLUMNS])
    typer.echo(f"... {counted(changes, 'change')} of {counted(len(tables), 'table')} in {seconds:.2f} s")


def _run_pipeline(file: Path) -> None:
    # Imported here, so that the first rows appear before the engine is loaded.
    from penstock.engine.sink_runs import run_of
    from penstock.local.driver import LocalDriver
    from penstock.pipeline.settings import load_pipeline

    began, written = time.monotonic(), 0

    def count(progress: Mapping[str, Any]) -> None:
        nonlocal written
        written += progress.get("written", 0)

    settings = load_pipeline(file)
    with _only_warnings():
        run_of(settings, LocalDriver(), until_caught_up=True, stop=threading.Event(), report=count).run()
    typer.echo(f"{counted(written, 'change')} written in {time.monotonic() - began:.2f} s")


@contextmanager
def _only_warnings() -> Iterator[None]:
    """Log no progress inside the block, because the demo itself prints the progress."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        yield
    finally:
        structlog.configure(**before)


def _compare(name: str, folder: Path, keys: Sequence[str], tables: Mapping[str, Sequence[Row]]) -> int:
    """Compare the rows that result from replaying a table's files with the rows on the server; return how
    many differ.
    """
    target = _replay(folder, keys)
    source = {_key(row, keys): row for row in tables[name]}
    wrong = [key for key in source.keys() | target.keys() if source.get(key) != target.get(key)]
    if wrong:
        typer.echo(f"{name}: {counted(len(wrong), 'row')} of {len(source):,} differ: {wrong[0]}, ...")
    else:
        typer.echo(f"{name}: equal, {counted(len(source), 'row')}")
    return len(wrong)


def _replay(folder: Path, keys: Sequence[str]) -> dict[tuple[str, ...], Row]:
    """Apply a table's changes in log order; return the remaining rows, by key."""
    import pyarrow.dataset
    import pyarrow.parquet

    schema = pyarrow.parquet.read_schema(folder / "_schema.parquet")
    files = sorted(str(file) for file in folder.glob("*-*.parquet"))
    changes = pyarrow.dataset.dataset(files, schema).to_table().to_pylist()
    rows: dict[tuple[str, ...], Row] = {}
    for change in sorted(changes, key=_log_order):
        row = {name: _text(value) for name, value in change.items() if not name.startswith("_")}
        if change["_change_type"] in ("insert", "update_postimage"):
            rows[_key(row, keys)] = row
        else:
            rows.pop(_key(row, keys), None)
    return rows


def _log_order(change: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a sort key in log order. The two rows of an update have the same number."""
    is_after_image = change["_change_type"] == "update_postimage"
    return change["_commit_version"], change["_metadata"]["row"], is_after_image


def _key(row: Row, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in keys)


def _text(value: Any) -> str | None:
    """Return a value in the form of the sample's rows: bytes as hexadecimal digits, times in UTC."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC).replace(tzinfo=None)
    match value:
        case None:
            return None
        case bytes():
            return value.hex()
        case date():
            return value.isoformat()
        case list():
            return ",".join(value)
    return str(value)
