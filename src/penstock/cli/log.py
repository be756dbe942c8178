# SPDX-License-Identifier: Apache-2.0
"""`penstock log`: list, search, verify, export and trim a stored log."""

import dataclasses
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.shared.options import Json, LogConfig, LogName
from penstock.cli.shared.progress import ReadingProgress
from penstock.cli.shared.rendering import Field, LineWriter, bytes_text, counted, field_lines, write_json
from penstock.errors import OptionInvalid, PositionInvalid
from penstock.model import Position

if TYPE_CHECKING:
    from penstock.logstore.locate import Located
    from penstock.logstore.reader import LogReader
    from penstock.logstore.records import BlockRecord, SegmentRecord
    from penstock.logstore.trim import TrimPlan
    from penstock.logstore.verify import Finding
    from penstock.source.bounds import Bound
    from penstock.source.source import Source

HELP = "List, search, verify, export and trim a kept log."

EXIT_FINDINGS = 1

# The default number of blocks of table output. JSON output has no limit.
_BLOCKS_DEFAULT = 1000


# --- list -----------------------------------------------------------------------------------


def list_segments(log: LogName = None, config: LogConfig = None, json: Json = False) -> None:
    """List the segments of a log, with source file, byte range, counts and state."""
    from penstock.cli.shared.log_folder import LogFolder, segments_of

    reader = LogFolder.find(log, config).open()
    lines = [_segment_line(reader, record) for record in segments_of(reader)]
    if json:
        write_json(sys.stdout, lines)
        return
    writer = LineWriter(sys.stdout, _SEGMENT_FIELDS)
    for line in lines:
        writer.write([line[field.name] for field in _SEGMENT_FIELDS])
    totals = {name: sum(line[name] for line in lines) for name in ("transactions", "changes", "bytes")}
    counts = [counted(len(lines), "segment"), *(counted(totals[f"{noun}s"], noun) for noun in _COUNTED)]
    typer.echo(f"{', '.join(counts)}, {bytes_text(totals['bytes'])}; up to {reader.visible or '-'}")


_COUNTED = ("transaction", "change")
_SEGMENT_FIELDS = [
    Field("segment", 19),
    Field("state", 6),
    Field("epoch", 5, right=True),
    Field("file", 18),
    Field("from", 11, right=True),
    Field("to", 11, right=True),
    Field("first", 27),
    Field("last", 27),
    Field("transactions", 12, right=True),
    Field("changes", 12, right=True),
    Field("bytes", 13, right=True),
]


def _segment_line(reader: "LogReader", record: "SegmentRecord") -> dict[str, Any]:
    """Return a segment as plain values; `last` is the latest commit time up to the segment's end."""
    from penstock.cli.shared.log_folder import end_of, head_of, moment
    from penstock.logstore.records import STATES

    return {
        "segment": f"{record.version:019d}",
        "state": STATES[record.state],
        "hour": record.hour,
        "epoch": record.epoch,
        "file": head_of(reader, record).file,
        "from": record.base,
        "to": end_of(reader, record),
        "first": moment(record.time_first_us),
        "last": moment(record.time_max_us) if record.transactions else None,
        "transactions": record.transactions,
        "changes": record.changes,
        "bytes": record.stored_bytes,
        "server_id": record.server_id,
    }


# --- show -----------------------------------------------------------------------------------


def show(
    log: LogName = None,
    segment: Annotated[
        str | None,
        typer.Argument(metavar="SEGMENT", help="The segment's number or file. Default: the newest."),
    ] = None,
    config: LogConfig = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0, help=f"Maximum number of blocks; 0 for all. Default for tables: {_BLOCKS_DEFAULT}."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with the blocks.")] = False,
) -> None:
    """Show one segment: header, counts and blocks. LOG may also be the segment's file."""
    from penstock.cli.shared.log_folder import LogFolder, head_of
    from penstock.logstore.records import BlockRecord

    if log is not None and config is None and Path(log).is_file() and segment is None:
        log, segment = str(Path(log).absolute().parent.parent), Path(log).name
    reader = LogFolder.find(log, config).open()
    record = _chosen(reader, segment)
    head = head_of(reader, record)
    with reader.open_blocks(record) as (data, blocks):
        block_records = [BlockRecord.of(block) for block in blocks.records()]
        path = data.segment.path
    line = {
        **_segment_line(reader, record),
        "path": str(path),
        "head_bytes": record.head_bytes,
        "flavor": head.flavor,
        "gtid_set": head.gtid_set,
        "blocks": [_block_line(record, block) for block in block_records],
    }
    if json:
        write_json(sys.stdout, [line])
        return
    for text in field_lines({name: value for name, value in line.items() if name != "blocks"}):
        typer.echo(text)
    typer.echo("")
    blocks_max = _BLOCKS_DEFAULT if limit is None else limit or len(block_records)
    writer = LineWriter(sys.stdout, _BLOCK_FIELDS)
    for number, block in enumerate(line["blocks"][:blocks_max]):
        writer.write([number, *(block[field.name] for field in _BLOCK_FIELDS[1:])])
    if len(block_records) > blocks_max:
        typer.echo(
            f"The first {blocks_max} of {len(block_records)} blocks are shown; --limit 0 shows all.", err=True
        )


_BLOCK_FIELDS = [
    Field("block", 6, right=True),
    Field("from", 11, right=True),
    Field("to", 11, right=True),
    Field("time", 27),
    Field("transactions", 12, right=True),
    Field("changes", 9, right=True),
    Field("events", 8, right=True),
    Field("begins", 11),
    Field("ends", 11),
    Field("gtid", 0),
]


def _block_line(segment: "SegmentRecord", block: "BlockRecord") -> dict[str, Any]:
    from penstock.cli.shared.log_folder import moment

    return {
        "from": block.source_start,
        "to": block.source_end,
        "segment_offset": segment.head_bytes + block.source_start - segment.base,
        "time": moment(block.time_us),
        "time_max": moment(block.time_max_us),
        "transactions": block.transactions,
        "changes": block.changes,
        "events": block.events,
        "begins": "boundary" if block.begins_at_boundary else "inside",
        "ends": "boundary" if block.ends_at_boundary else "inside",
        "gtid": _gtid(block),
        "last_boundary": block.last_boundary or None,
    }


def _gtid(block: "BlockRecord") -> str | None:
    """Return the GTID of a block's first transaction, in the form of MySQL or MariaDB."""
    if not block.gtid_number:
        return None
    source, number = block.gtid_source, block.gtid_number
    if any(source[8:]):
        return f"{UUID(bytes=source)}:{number}"
    domain, server = (int.from_bytes(source[at : at + 4], "little") for at in (0, 4))
    return f"{domain}-{server}-{number}"


def _chosen(reader: "LogReader", segment: str | None) -> "SegmentRecord":
    from penstock.cli.shared.log_folder import segments_of

    records = segments_of(reader)
    if not records:
        raise PositionInvalid(
            f"the log in {reader.folder} is empty", hint="Start the capture, then ask again"
        )
    if segment is None:
        return records[-1]
    number = segment.split("/")[-1].split(".", 1)[0]
    matching = [record for record in records if number.isdecimal() and record.version == int(number)]
    if not matching:
        raise OptionInvalid(f"the log has no segment {segment!r}", hint="Run: penstock log list")
    return matching[0]


# --- locate ---------------------------------------------------------------------------------


def locate(
    log: LogName = None,
    at: Annotated[
        str | None, typer.Option("--time", help="A timestamp, or a time of day (UTC) such as 14:05:00.")
    ] = None,
    gtid: Annotated[str | None, typer.Option(help="A transaction's GTID.")] = None,
    gtid_set: Annotated[
        str | None, typer.Option(help="Find the first transaction outside this GTID set.")
    ] = None,
    position: Annotated[
        str | None, typer.Option(help="A position of the source: [epoch/]file:offset.")
    ] = None,
    config: LogConfig = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find a position in a log by time, GTID, GTID set or source position."""
    from penstock.cli.shared.log_folder import (
        LogFolder,
        committed_from,
        first_from,
        is_gtid,
        outside,
        parse_time,
    )
    from penstock.source.bounds import Bound

    options = {"--time": at, "--gtid": gtid, "--gtid-set": gtid_set, "--position": position}
    used_options = [name for name, value in options.items() if value is not None]
    if len(used_options) != 1:
        raise OptionInvalid("one place at a time", hint=f"Give one of {', '.join(options)}")
    chosen = LogFolder.find(log, config)
    reader = chosen.open()
    source = chosen.source()
    if at is not None:
        time_us = parse_time(at)
        description, located = f"from {Bound(time_us=time_us)} on", reader.locate_time(time_us)
        exact = first_from(reader, source, located.position, committed_from(time_us))
    elif gtid is not None:
        description, located = gtid, reader.locate_gtid(gtid)
        exact = first_from(reader, source, located.position, is_gtid(gtid))
    elif gtid_set is not None:
        description, located = f"after {gtid_set}", reader.locate_gtid_set(gtid_set)
        is_outside = outside(gtid_set, reader.gtid_set(located.position))
        exact = first_from(reader, source, located.position, is_outside)
    else:
        assert position is not None, "one of four is given"
        description, located = position, reader.locate_position(Position.parse(position))
        exact = located.position
    line = _located_line(reader, located, exact)
    if json:
        write_json(sys.stdout, [line])
        return
    typer.echo(description)
    for text in field_lines(line):
        typer.echo(f"  {text}")


def _located_line(reader: "LogReader", located: "Located", exact: Position) -> dict[str, Any]:
    from penstock.cli.shared.log_folder import moment

    segment, block = located.segment, located.record
    return {
        "position": str(exact),
        "epoch": exact.epoch,
        "file": exact.file,
        "offset": exact.offset,
        "is_end": exact == reader.visible,
        "segment": f"{segment.version:019d}",
        "segment_offset": segment.head_bytes + exact.offset - segment.base,
        "block_from": block.source_start if block is not None else None,
        "block_to": block.source_end if block is not None else None,
        "block_time": moment(block.time_us) if block is not None else None,
        "block_gtid": _gtid(block) if block is not None else None,
        "pages_read": located.pages_read,
        "bytes_read": located.bytes_read,
    }


# --- verify ---------------------------------------------------------------------------------


def run_verify(
    log: LogName = None,
    heal: Annotated[
        bool,
        typer.Option("--heal", help="Rebuild indexes that do not match their data. Stop the daemon first."),
    ] = False,
    config: LogConfig = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per finding.")] = False,
) -> None:
    """Verify every byte of a log: checksums, headers, both indexes, order and epochs.

    Exits with 1 if a check failed and was not healed. Data is never changed.
    """
    from penstock.cli.shared.log_folder import LogFolder
    from penstock.logstore.disk import LocalDisk
    from penstock.logstore.layout import Layout
    from penstock.logstore.verify import verify

    chosen = LogFolder.find(log, config)
    chosen.check()
    disk, layout = LocalDisk(), Layout(chosen.folder)
    console, findings_list = Console(highlight=False, soft_wrap=True), []
    with ReadingProgress(f"verify {chosen.name}", 0, alone=True) as progress:
        for finding in verify(
            disk,
            layout,
            heal=heal,
            block_bytes=chosen.block_bytes,
            tier=chosen.tier(disk),
            progress=progress.reach_of,
        ):
            findings_list.append(finding)
            with progress.aside():
                if json:
                    write_json(sys.stdout, [finding.to_json()])
                else:
                    _report(console, finding)
    broken = [finding for finding in findings_list if not finding.harmless and not finding.healed]
    if not json:
        healed = sum(finding.healed for finding in findings_list)
        harmless = len(findings_list) - len(broken) - healed
        findings = _findings_text(len(broken), healed, harmless)
        console.print(f"{chosen.name}: {bytes_text(progress.done)} read, {findings}")
    if broken:
        raise typer.Exit(EXIT_FINDINGS)


def _findings_text(broken: int, healed: int, harmless: int) -> str:
    parts = [counted(broken, "finding")] if broken else []
    parts += [f"{number} {noun}" for number, noun in ((healed, "healed"), (harmless, "harmless")) if number]
    return ", ".join(parts) or "sound"


def _report(console: Console, finding: "Finding") -> None:
    mark, style = ("healed", "green") if finding.healed else ("DAMAGED", "bold red")
    if finding.harmless:
        mark, style = "harmless", "yellow"
    console.print(Text.assemble((mark, style), f"  {finding.kind.value}  {finding.name}: {finding.message}"))
    console.print(Text.assemble(("  at    ", "dim"), finding.position))
    if finding.hint is not None:
        console.print(Text.assemble(("  hint  ", "dim"), finding.hint))


# --- export ---------------------------------------------------------------------------------


def run_export(
    log: LogName = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Start at a position (an end of a transaction) or time, or after a GTID set."
            " Default: the log's start.",
        ),
    ] = None,
    end: Annotated[
        str | None,
        typer.Option(
            "--to", help="Stop at a position (an end of a transaction) or time. Default: the log's end."
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", help="The output file for a single source file, or FOLDER/ for several."
        ),
    ] = None,
    config: LogConfig = None,
    json: Json = False,
) -> None:
    """Export part of a log as plain binlog files, readable by mysqlbinlog and mariadb-binlog."""
    from penstock.cli.shared.log_folder import LogFolder
    from penstock.logstore.disk import LocalDisk
    from penstock.logstore.export import export

    if output is None:
        raise OptionInvalid("no output is named", hint="Add -o FILE, or -o FOLDER/")
    chosen = LogFolder.find(log, config)
    reader = chosen.open()
    source = chosen.source()
    start_position, end_position = (_bound(reader, source, bound) for bound in (start, end))
    if start_position is not None and end_position is not None and end_position < start_position:
        raise OptionInvalid(
            f"{end} is before {start}", position=str(end_position), hint="Swap --from and --to"
        )
    target = Path(output)
    folder, single = target, not (target.is_dir() or output.endswith("/"))
    if single:
        folder = target.with_name(f".{target.name}.export")
        _check_single(reader, start_position, end_position, target)
    with ReadingProgress(f"export {chosen.name}", 0, alone=True) as progress:
        written = export(reader, folder, start_position, end_position, progress=progress.reach_of)
    if single:
        disk = LocalDisk()
        disk.rename(written[0].path, target)
        disk.remove_folder(folder)
        disk.sync_folder(target.absolute().parent)
        written = [dataclasses.replace(written[0], path=target)]
    lines = [
        {"path": str(file.path), "from": str(file.start), "to": str(file.end), "bytes": file.bytes_written}
        for file in written
    ]
    if json:
        write_json(sys.stdout, lines)
        return
    for line in lines:
        typer.echo(f"{line['path']}: {line['from']} to {line['to']}, {line['bytes']:,} bytes")


def _bound(reader: "LogReader", source: "Source", text: str | None) -> Position | None:
    """Return the position of a bound. For a time or a GTID set, it is exact to the transaction."""
    from penstock.cli.shared.log_folder import committed_from, first_from, outside

    if text is None:
        return None
    bound = _parsed(text)
    if bound.position is not None:
        return bound.position
    if bound.gtid_set is not None:
        start = reader.locate_gtid_set(bound.gtid_set).position
        return first_from(reader, source, start, outside(bound.gtid_set, reader.gtid_set(start)))
    assert bound.time_us is not None, "a bound has one field"
    return first_from(
        reader, source, reader.locate_time(bound.time_us).position, committed_from(bound.time_us)
    )


def _parsed(text: str) -> "Bound":
    """Parse a bound or a time of day."""
    from penstock.cli.shared.log_folder import is_time_of_day, parse_time
    from penstock.source.bounds import Bound, parse_bound

    return Bound(time_us=parse_time(text)) if is_time_of_day(text) else parse_bound(text)


def _check_single(
    reader: "LogReader", start_position: Position | None, end_position: Position | None, output: Path
) -> None:
    if output.exists():
        raise OptionInvalid(f"{output} is there already", hint="Name another file, or remove it")
    pieces = [
        extent
        for extent in reader.extents()
        if (start_position is None or extent.last > start_position)
        and (end_position is None or extent.first < end_position)
    ]
    if len(pieces) > 1:
        raise OptionInvalid(
            f"this lies in {len(pieces)} source files, and a binlog file holds one",
            hint=f"Name a folder: -o {output}/",
        )


# --- trim -----------------------------------------------------------------------------------


def run_trim(
    log: LogName = None,
    before: Annotated[
        str | None, typer.Option(help="Delete segments that end before this position or time.")
    ] = None,
    force: Annotated[
        list[str] | None, typer.Option(help="Ignore this hold. Repeat the option for each hold.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be deleted; change nothing.")
    ] = False,
    reason: Annotated[str, typer.Option(help="The reason to record in audit.log.")] = "",
    config: LogConfig = None,
    json: Json = False,
) -> None:
    """Delete the oldest segments of a log. Stop its daemon first. The newest segment is always kept."""
    from penstock.cli.shared.log_folder import LogFolder, user_name
    from penstock.logstore.audit import AuditLine
    from penstock.logstore.retention import Retention, RetentionPolicy
    from penstock.logstore.trim import check_holds, trim

    if before is None:
        raise OptionInvalid("nothing says what is to go", hint="Add --before TIME or --before file:offset")
    bound = _parsed(before)
    if bound.gtid_set is not None:
        raise OptionInvalid("--before is a position or a time", hint="Find it with: penstock log locate")
    chosen = LogFolder.find(log, config)
    if dry_run:
        reader = chosen.open()
        _show_trim(_trim_line(reader, _plan(reader, bound)), None, json)
        return
    with chosen.open_for_writing() as log_here:
        plan = _plan(log_here, bound)
        check_holds(plan, force or [])
        line = _trim_line(log_here, plan)
        if plan.segments:
            AuditLine(
                time=datetime.now(UTC).isoformat(),
                user=user_name(),
                verb="log trim",
                old=line["first"],
                new=line["first_kept"],
                reason=reason
                or " ".join(["--before", before, *(f"--force {hold_name}" for hold_name in force or [])]),
            ).write(log_here.disk, log_here.layout)
        retention = Retention(log_here.disk, log_here.layout, RetentionPolicy(), tier=log_here.tier)
        freed = trim(log_here, retention, plan)
    _show_trim(line, freed, json)


def _plan(reader: "LogReader", bound: "Bound") -> "TrimPlan":
    from penstock.logstore.holds import Holds
    from penstock.logstore.trim import plan_trim

    holds = Holds(reader.disk, reader.layout).all()
    return plan_trim(reader.segments, holds, before=bound.position, before_time_us=bound.time_us)


def _trim_line(reader: "LogReader", plan: "TrimPlan") -> dict[str, Any]:
    from penstock.cli.shared.log_folder import head_of

    def begin(record: "SegmentRecord | None") -> str | None:
        if record is None:
            return None
        return str(Position(record.epoch, head_of(reader, record).file, record.base))

    return {
        "segments": [f"{segment.version:019d}" for segment in plan.segments],
        "transactions": sum(segment.transactions for segment in plan.segments),
        "changes": sum(segment.changes for segment in plan.segments),
        "bytes": sum(segment.stored_bytes for segment in plan.segments),
        "first": begin(plan.segments[0] if plan.segments else None),
        "first_kept": begin(plan.first_kept),
        "held_by": {hold.name: str(hold.position) for hold in plan.held_by},
    }


def _show_trim(line: dict[str, Any], freed: int | None, as_json: bool) -> None:
    if as_json:
        write_json(sys.stdout, [{**line, "dry_run": freed is None, "bytes_freed": freed or 0}])
        return
    counts = [counted(len(line["segments"]), "segment"), counted(line["transactions"], "transaction")]
    summary = f"{', '.join(counts)}, {bytes_text(line['bytes'])}"
    typer.echo(f"would go: {summary}" if freed is None else f"gone: {summary}, {bytes_text(freed)} freed")
    typer.echo(f"the log {'would begin' if freed is None else 'begins'} at {line['first_kept'] or '-'}")
    for name, position in line["held_by"].items():
        typer.echo(f"hold {name} asked to keep what follows {position}: --force {name}")


VERBS = {
    "list": list_segments,
    "show": show,
    "locate": locate,
    "verify": run_verify,
    "export": run_export,
    "trim": run_trim,
}
