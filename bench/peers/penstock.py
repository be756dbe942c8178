# SPDX-License-Identifier: Apache-2.0
"""Penstock itself, through its public API."""

import shutil
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path

from pyarrow import compute

from bench.captured import capture_all, end_of, settings_of
from bench.corpora.corpus import FILE_NAME
from bench.corpora.workload import DATABASE
from penstock import read_binlog
from penstock.logstore.reader import LogReader
from penstock.model import Position, ServerAddress, TablePatterns, Tls
from penstock.mysql.replica import DumpStart, open_stream
from penstock.source.reading import Selection, read_range
from penstock.source.source import ByteRange, SourceOptions, open_source

from .peer import Job, Tally

TITLE = "Penstock"
_FIRST_EVENT_OFFSET = 4
_COMPARE_BYTES = 1 << 24
#: The message kinds that are changes, by the names of the corpus.
_KINDS = {0: "insert", 1: "update", 2: "delete"}


def version() -> str:
    """Return the version of the package."""
    return metadata.version("penstock")


def decode_file(job: Job) -> Tally:
    """Decode every column of every row into Arrow batches, and count their rows by kind."""
    counts = {"insert": 0, "update_preimage": 0, "update_postimage": 0, "delete": 0}
    for batch in read_binlog(str(job.corpus.path), tables=[f"{DATABASE}.*"]):
        kinds = compute.value_counts(batch.to_arrow().column("_change_type"))
        for kind in kinds:
            counts[kind["values"].as_py()] += kind["counts"].as_py()
    assert counts["update_preimage"] == counts["update_postimage"], "every update has two images"
    by_kind = {"insert": counts["insert"], "update": counts["update_postimage"], "delete": counts["delete"]}
    return Tally(sum(by_kind.values()), job.corpus.bytes, by_kind)


def encode_debezium(job: Job) -> Tally:
    """Write every change as Debezium's JSON, one per line."""
    return _encoded(job, "debezium")


def encode_maxwell(job: Job) -> Tally:
    """Write every change as Maxwell's JSON, one per line."""
    return _encoded(job, "maxwell")


def encode_canal_flat(job: Job) -> Tally:
    """Write every rows event as Canal's flat JSON message, one per line."""
    return _encoded(job, "canal_flat")


def _encoded(job: Job, dialect: str) -> Tally:
    source = open_source(SourceOptions.parse(str(job.corpus.path), instance="bench"))
    byte_range = ByteRange(0, FILE_NAME, _FIRST_EVENT_OFFSET, None, aligned=True)
    selection = Selection(TablePatterns([f"{DATABASE}.*"]))
    counts = Counter(dict.fromkeys(_KINDS.values(), 0))
    written = 0
    for batch in read_range(source, byte_range, selection, emit="messages", dialect=dialect):
        table = batch.to_arrow()
        written += table.column("value").get_total_buffer_size()
        for kind, name in _KINDS.items():
            rows = table.column("rows").filter(compute.equal(table.column("kind"), kind))
            counts[name] += compute.sum(rows).as_py() or 0
    note = f"{written / 1e6:,.0f} MB of {dialect}"
    return Tally(counts.total(), job.corpus.bytes, dict(counts), note=note)


def receive_raw(job: Job) -> Tally:
    """Receive the log over TCP without TLS and write its event bytes to a file."""
    directory = Path(tempfile.mkdtemp(prefix="bench-raw-", dir=job.directory))
    path = directory / FILE_NAME
    address = ServerAddress(port=job.port or 0, tls=Tls("disabled"))
    start = DumpStart(Position(0, FILE_NAME, _FIRST_EVENT_OFFSET))
    with open_stream(address, start, bounded=True) as stream, open(path, "wb") as file:
        file.writelines(stream.event_chunks())

    def verify() -> None:
        same = _holds_corpus(path, job.corpus.path)
        shutil.rmtree(directory)
        assert same, "the received bytes differ from the original file"

    return Tally(job.corpus.rows, job.corpus.bytes, verify=verify)


def capture_log(job: Job) -> Tally:
    """Capture the server into `job.copies` logs, synced each second, until everything is durable."""
    folder = Path(tempfile.mkdtemp(prefix="bench-log-", dir=job.directory))
    settings = settings_of(folder, job.port or 0, job.copies)
    capture_all(settings, end_of(job.corpus))

    def verify() -> None:
        same = all(_log_holds_corpus(folder / name, job.corpus.path) for name in settings.instances)
        shutil.rmtree(folder)
        assert same, "a log differs from the original file"

    return Tally(job.copies * job.corpus.rows, job.copies * job.corpus.bytes, verify=verify)


def _log_holds_corpus(folder: Path, original: Path) -> bool:
    """Return whether a log returns all bytes of the original file."""
    log = LogReader.open(folder)
    start, size = log.extents()[0].start, original.stat().st_size
    with open(original, "rb") as file:
        if file.read(start) != log.head_bytes(0, FILE_NAME):
            return False
        return all(file.read(len(piece)) == piece for piece in log.read(0, FILE_NAME, start, size))


def _holds_corpus(received: Path, original: Path) -> bool:
    """Return whether the received events equal the original's, apart from the rotate event at the start of
    every dump.

    This first event names the file and is not part of it; bytes 9 to 12 of its header contain its length.
    After the original's last byte, the received events continue with the server's current file.
    """
    with open(received, "rb") as received_file, open(original, "rb") as original_file:
        header = received_file.read(19)
        received_file.seek(int.from_bytes(header[9:13], "little"))
        original_file.seek(_FIRST_EVENT_OFFSET)
        while piece := original_file.read(_COMPARE_BYTES):
            if received_file.read(len(piece)) != piece:
                return False
    return True
