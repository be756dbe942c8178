# SPDX-License-Identifier: Apache-2.0
"""Decodes damaged logs, and cuts them into blocks, in a separate process: `python -m tests.fuzz.attack CORPUS
SEED SECONDS`.

Exits with 0 and one line of counts. Fails if a log makes the decoder panic, raise an error outside
`penstock.errors`, hang, return invalid Arrow, or use memory out of proportion; the last printed line holds
the seed of the case.
"""

import faulthandler
import random
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow

from penstock._native import Decoder, follow_events, row_hashes
from penstock.errors import OptionInvalid, PenstockError
from tests.fuzz.mutation import mutate
from tests.support.binlog.block_cutting import Cutting, framed
from tests.support.binlog.events import first_event_end
from tests.support.suite.patience import WAIT_SECONDS_MAX

# The minimum number of cases, even on a busy machine, for the test to be meaningful.
CASES_MIN = 300
DIALECTS = ("canal", "canal_flat", "ptubes", "debezium", "debezium_schema", "maxwell")
# zstd's window may be 128 MiB, and a decompressed event occupies memory at the same time.
GROWTH_BYTES_MAX = 512 << 20
# A decoder in an endless loop makes more requests or batches than any log of the corpus has events.
ANSWERS_MAX = 200_000


def main(folder: Path, seed: int, seconds: float) -> int:
    """Decode damaged logs until the time is over, and at least CASES_MIN of them."""
    corpus = [path.read_bytes() for path in sorted(folder.iterdir())]
    outcomes: Counter[str] = Counter()
    for data in corpus:
        outcomes[attack(data, random.Random(0), plain=True)] += 1
    assert outcomes["decoded"] == len(corpus), f"logs that are not damaged: {outcomes}"
    memory_start = resident_bytes_max()
    end, last = time.monotonic() + seconds, seed + CASES_MIN
    while time.monotonic() < end or seed < last:
        seed += 1
        faulthandler.dump_traceback_later(WAIT_SECONDS_MAX, exit=True)
        try:
            outcomes[case(corpus, seed)] += 1
        except BaseException:
            print(f"seed {seed}", flush=True)
            raise
        growth = resident_bytes_max() - memory_start
        if growth > GROWTH_BYTES_MAX:
            print(f"{growth} bytes of memory, seed {seed}", flush=True)
            return 1
    faulthandler.cancel_dump_traceback_later()
    print(f"{sum(outcomes.values())} cases: {dict(outcomes.most_common())}")
    return 0


def case(corpus: list[bytes], seed: int) -> str:
    """Damage one log and decode it; the seed alone determines how."""
    chance = random.Random(seed)
    return attack(mutate(corpus, chance), chance)


def attack(data: bytes, chance: random.Random, plain: bool = False) -> str:
    """Decode or cut bytes to their end or to their first error, and name the outcome."""
    try:
        if not plain and chance.random() < 0.3:
            return chance.choice((cut_log, drain_log))(data, chance)
        decoder, start = make_decoder(data, chance, plain)
        run(decoder, memoryview(data)[start:], chance)
        return "decoded"
    except PenstockError as error:
        return type(error).__name__


def make_decoder(data: bytes, chance: random.Random, plain: bool) -> tuple[Decoder, int]:
    options: dict[str, Any] = {"instance": "fuzz", "file": "binlog.000001"}
    start = 0
    if not plain:
        options |= shape(chance)
        options |= {
            "verify_checksum": chance.random() < 0.5,
            "batch_rows_max": chance.choice((1, 3, 65_536)),
            "held_bytes_max": chance.choice((1, 100, 67_108_864)),
            "resume_rows": chance.choice((0, 0, 0, 1, 7)),
            "live": chance.random() < 0.2,
        }
        if chance.random() < 0.3 and len(data) > 200:
            with suppress(PenstockError):
                # A range must start at an event, if the damage has left any event.
                start = follow_events(data[4:], 4, chance.randrange(4, len(data)))[0] or 4
            start = max(start, 4)
            options |= {"offset": start, "aligned": False, "head": head_of(data)}
        if chance.random() < 0.3:
            options["stop"] = (1, chance.randrange(len(data) + 100))
        if chance.random() < 0.1:
            options["changes"] = chance.sample(("insert", "update_preimage", "update_postimage", "delete"), 2)
        if options["live"]:
            start = max(start, 4)
            options["offset"] = start
    return Decoder(**options), start


def shape(chance: random.Random) -> dict[str, Any]:
    """Choose the output format of the decoder."""
    emit = chance.choice(("typed", "typed", "envelope", "events", "transactions", "messages", "messages"))
    if emit != "messages":
        return {"emit": emit}
    return {
        "emit": emit,
        "dialect": chance.choice(DIALECTS),
        "message_per_row": chance.random() < 0.5,
        "server_zone_seconds": chance.choice((0, -43_200, 50_400)),
        "executed": chance.choice((None, "", "0-1-5")),
    }


def cut_log(data: bytes, chance: random.Random) -> str:
    """Cut bytes into blocks, as a file or as a dump sends them."""
    live = chance.random() < 0.3
    options = {"epoch": 0, "file": "binlog.000001", "offset": 4 if live else 0, "live": live}
    flavor = chance.choice(("mysql", "mariadb"))
    cutting = Cutting(**options, flavor=flavor, block_bytes=chance.choice((1, 300, 65_536)))
    view, piece = memoryview(data), chance.choice((64, 1000, 1 << 20))
    cutting.events(view[at : at + piece] for at in range(4 if live else 0, len(view), piece)).close()
    kept = sum(len(part.content) for part in cutting.parts)
    assert kept <= len(data)
    for part in cutting.parts:
        assert all(record.start < record.end for record in part.records)
    return "cut"


def drain_log(data: bytes, chance: random.Random) -> str:
    """Cut packets that arrive in a socket, as a capture cuts those of a fast server."""
    packets = b"".join(framed(event_pieces(data)))
    sent = chance.choice((300, 30_000))
    cutting = Cutting(offset=4, live=True, flavor=chance.choice(("mysql", "mariadb")))
    server, client = socket.socketpair()
    with server, client:
        client.setblocking(False)
        for at in range(0, len(packets), sent):
            server.sendall(packets[at : at + sent])
            incomplete = cutting.cutter.drain(client.fileno(), cutting.left, chance.choice((1, 1 << 20)))
            cutting.packets([incomplete])
    cutting.close()
    assert sum(len(part.content) for part in cutting.parts) <= len(data)
    return "drained"


def event_pieces(data: bytes) -> Iterator[bytes]:
    """Yield the events, by the sizes that their headers give."""
    at = 4
    while at < len(data):
        size = max(19, int.from_bytes(data[at + 9 : at + 13], "little"))
        yield data[at : at + size]
        at += size


def head_of(data: bytes) -> bytes:
    return data[: min(first_event_end(data), len(data), 4096)]


def run(decoder: Decoder, view: memoryview, chance: random.Random) -> None:
    """Offer the bytes in pieces of random sizes, and answer the decoder's requests."""
    piece = chance.choice((64, 1000, 1 << 20))
    start, end = 0, 0
    answers = 0
    while True:
        state = decoder.state
        answers += 1
        assert answers < ANSWERS_MAX, "the decoder does not come to an end"
        if state == "batch":
            check(decoder.take_batch())
        elif state == "statement":
            statement = decoder.take_statement()
            if chance.random() < 0.3:
                decoder.forget_tables()
            decoder.answer_statement(random.Random(answers).random() < 0.8)
            assert isinstance(statement.text, str)
        elif state == "table":
            answer(decoder, chance)
            if random.Random(answers).random() < 0.1:
                decoder.close_batches()
        elif state == "prepared":
            if not offer_prepared(decoder, view, chance):
                decoder.abandon()
        elif state == "done" or (end == len(view) and start == end):
            break
        else:
            taken = decoder.feed(view[start:end])
            assert 0 <= taken <= end - start
            start += taken
            if decoder.state == "input":
                if end == len(view):
                    break
                end = min(len(view), end + max(piece, end - start))
    while True:
        decoder.finish(len(view) - start, drop_open=chance.random() < 0.5)
        if decoder.state != "batch":
            return
        check(decoder.take_batch())


def offer_prepared(decoder: Decoder, view: memoryview, chance: random.Random) -> bool:
    """Offer bytes of the log for a requested prepared transaction; return whether any were accepted."""
    if (request := decoder.prepared_request()) is not None:
        file, start, end = request[2] or ("binlog.000001", chance.randrange(4, 5000), 5000)
        decoder.answer_prepared(file, start, end, bytes(view[:300]) if chance.random() < 0.9 else None)
    return decoder.feed_prepared(view[chance.randrange(max(len(view), 1)) :]) > 0


def answer(decoder: Decoder, chance: random.Random) -> None:
    request = decoder.table_request()
    columns = request.columns
    luck = chance.random()
    if luck < 0.1:
        decoder.answer_table(None)
    elif luck < 0.3 and columns:
        # A schema with shuffled types, which may not fit the table map.
        types = [column[1:] for column in columns]
        chance.shuffle(types)
        decoder.answer_table([(column[0], *kind) for column, kind in zip(columns, types, strict=True)])
    elif luck < 0.4:
        count = request.column_count
        decoder.answer_table([(f"c{index}", chance.choice(TYPES), "utf8mb4", True) for index in range(count)])
    else:
        names = [column[0] for column in columns or ()]
        # Use a separate generator, so that the random numbers of other choices do not change.
        shards = random.Random(luck).choice((None, [], names[:2], names[-1:], ["none such"]))
        decoder.answer_table(
            columns if luck > 0.8 else None, from_log=True, primary_key=names[:1], shard_columns=shards
        )


TYPES = (
    "int", "bigint unsigned", "varchar(20)", "text", "blob", "decimal(65,30)", "json", "datetime(6)",
    "time(3)", "timestamp", "year", "bit(64)", "enum('a','b')", "set('a','b')", "geometry", "float", "double",
    "binary(3)", "date",
)  # fmt: skip


def check(batch: Any) -> None:
    record = pyarrow.record_batch(batch)
    record.validate(full=True)
    # The kernel imports the batch and reads its columns up to the first that has no table type.
    with suppress(OptionInvalid):
        row_hashes(record, record.schema.names)


def resident_bytes_max() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
