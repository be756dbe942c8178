# SPDX-License-Identifier: Apache-2.0
"""The options of `format("penstock")`, parsed and validated once, with secrets kept out of representations.

Spark passes option names in any case, and values as text.
"""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import OptionInvalid
from penstock.limits import RANGE_BYTES_DEFAULT
from penstock.model import Secret, TablePatterns, Tls, is_server_url
from penstock.source.bounds import Bound, parse_bound
from penstock.source.daemon_address import is_daemon_url
from penstock.source.offsets import EARLIEST, LATEST, Offset, StartText
from penstock.source.read_settings import ENVELOPE, TYPED, ReadSettings
from penstock.source.source import SourceOptions

# Every option, spelled as in the documentation, with its description.
KNOWN_OPTIONS: Mapping[str, str] = {
    "path": "A binlog file, a folder, or a glob pattern; plain, `.gz` or `.zst`; or a log's folder. "
    "`load(path)` sets it.",
    "paths": "Several paths, as a JSON list. `load([path, ...])` sets it.",
    "source": "A live server: `mysql://user@host:3306`, or a daemon's instance: `penstock://host:7070/shop`, "
    "with more hosts separated by commas. Set either `source` or a path.",
    "instance": "The cluster's name in `_metadata.instance`. Default: `host:port`, the daemon's instance, "
    "the log folder's name, or `files`.",
    "tables": "Patterns, separated by commas: `shop.orders`, `shop.*`, `/regex/`. Default: every table.",
    "excludeTables": "Patterns of tables to exclude.",
    "columns": "The columns to decode, including system columns, separated by commas. Default: all.",
    "mode": "`typed` (one table's own columns) or `envelope` (all tables in one shape). Default: `typed` "
    "if `tables` names exactly one table, otherwise `envelope`.",
    "startingOffsets": "`earliest`, `latest`, a position `mysql-bin.000003:1542`, a GTID set, or an offset "
    "in JSON. Inclusive; with a GTID set, what comes after it. Default: `latest` for a stream from a server, "
    "otherwise `earliest`.",
    "startingTimestamp": "Read transactions committed at or after this time (UTC unless it has a zone).",
    "endingOffsets": "Where a batch read ends; values as for `startingOffsets`. Exclusive; with a GTID set, "
    "up to and including it.",
    "endingTimestamp": "A batch read ends before transactions committed at or after this time.",
    "maxRowsPerTrigger": "Approximate rows per micro-batch. A micro-batch ends at the end of a transaction.",
    "maxBytesPerTrigger": "Approximate bytes of log per micro-batch, such as `64m`. Ends the same way.",
    "minPartitions": "Minimum number of byte ranges per read, if the log is long enough.",
    "rangeBytes": "Bytes of log per task, such as `128m`.",
    "failOnDataLoss": "`false`: if the server purged the next log, continue at its first. Default: `true`.",
    "schemas": "A `.sql` or `.json` file with table definitions, for logs without column names.",
    "schemaTrackingLocation": "A folder for the stream's schema history, for logs without column names.",
    "user": "The account, if the URL does not contain it.",
    "password": "The account's password. It is never printed.",
    "passwordFile": "A file with the password.",
    "token": "The daemon's token. It is never printed.",
    "tokenFile": "A file with the daemon's token. `PENSTOCK_TOKEN` also works.",
    "serverId": "The replica's `server_id`. Default: a random id.",
    "sslMode": "`disabled`, `preferred`, `required`, `verify_ca`, `verify_identity`. Default: `preferred`.",
    "sslCa": "A file with the certificate authorities to trust.",
    "sslCert": "A file with the client's certificate.",
    "sslKey": "A file with the client's private key.",
}

_SIZES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_settings(raw_options: Mapping[str, str]) -> ReadSettings:
    """Parse the options of one `load()`. Raises OptionInvalid, whose message never contains a password.

    `path` (files, folders, glob patterns) or `source` (a server's URL) selects what is read; `tables` and
    `excludeTables` select tables. `mode` is typed if exactly one table is named, otherwise envelope. Sizes
    may end in k, m, g or t. Times without a zone are UTC.
    """
    options = _canonical(raw_options)
    tables = TablePatterns(options.get("tables"), options.get("excludeTables"))
    mode = _mode(options.get("mode"), tables)
    columns = _names(options.get("columns"))
    if columns is not None and mode == ENVELOPE:
        raise OptionInvalid(
            "columns is for one table's own columns", hint="Name the table with tables, or leave columns out"
        )
    return ReadSettings(
        source=_source(options),
        tables=tables,
        mode=mode,
        columns=columns,
        start=_bound(options, "startingOffsets", "startingTimestamp"),
        end=_bound(options, "endingOffsets", "endingTimestamp"),
        rows_max=_count(options, "maxRowsPerTrigger"),
        bytes_max=_count(options, "maxBytesPerTrigger"),
        ranges_min=_count(options, "minPartitions") or 1,
        range_bytes=_count(options, "rangeBytes") or RANGE_BYTES_DEFAULT,
        fail_on_data_loss=_flag(options, "failOnDataLoss", default=True),
        schemas=options.get("schemas"),
        schema_tracking=options.get("schemaTrackingLocation"),
    )


def _canonical(raw_options: Mapping[str, str]) -> dict[str, str]:
    """Return the options by their documented names. Raises OptionInvalid for an unknown name."""
    by_lower = {name.lower(): name for name in KNOWN_OPTIONS}
    options = {}
    for name, value in raw_options.items():
        documented_name = by_lower.get(name.lower())
        if documented_name is None:
            matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.4)
            suggestion = f"Did you mean {by_lower[matches[0]]}? " if matches else ""
            raise OptionInvalid(
                f"option {name!r} is unknown", hint=f"{suggestion}Known: {', '.join(KNOWN_OPTIONS)}"
            )
        options[documented_name] = value
    return options


def _mode(text: str | None, tables: TablePatterns) -> str:
    single = tables.single()
    if text is None:
        return TYPED if single is not None else ENVELOPE
    mode = text.strip().lower()
    if mode not in (TYPED, ENVELOPE):
        raise OptionInvalid(f"mode {text!r} is unknown", hint=f"Use {TYPED} or {ENVELOPE}")
    if mode == TYPED and single is None:
        raise OptionInvalid(
            "mode typed needs exactly one table", hint='Set tables to one name, such as "shop.orders"'
        )
    return mode


def _source(options: Mapping[str, str]) -> SourceOptions:
    url, paths = options.get("source"), _paths(options)
    if url is not None and paths:
        raise OptionInvalid("source and a path are both given", hint="Name a server or files, not both")
    if url is None and not paths:
        raise OptionInvalid(
            "nothing to read is named",
            hint='Set source to mysql://user@host:3306, or load("/backup/mysql-bin.*")',
        )
    if url is not None and not (is_server_url(url) or is_daemon_url(url)):
        raise OptionInvalid(
            "source is no URL of a server or a daemon",
            hint="Write mysql://user@host:3306 or penstock://host:7070/instance",
        )
    password, token = options.get("password"), options.get("token")
    return SourceOptions.parse(
        url if url is not None else paths,
        instance=options.get("instance"),
        user=options.get("user"),
        password=None if password is None else Secret(password),
        password_file=options.get("passwordFile"),
        server_id=_count(options, "serverId"),
        tls=_tls(options),
        token=None if token is None else Secret(token),
        token_file=options.get("tokenFile"),
    )


def _paths(options: Mapping[str, str]) -> list[str]:
    paths = [options["path"]] if "path" in options else []
    if "paths" in options:
        paths += json.loads(options["paths"])
    # Spark and its users also write local files as URIs.
    return [path.removeprefix("file://") for path in paths]


def _tls(options: Mapping[str, str]) -> Tls | None:
    tls_options = {
        name: options[name] for name in ("sslMode", "sslCa", "sslCert", "sslKey") if name in options
    }
    if not tls_options:
        return None
    return Tls(
        tls_options.get("sslMode", "preferred").lower().replace("-", "_"),
        tls_options.get("sslCa"),
        tls_options.get("sslCert"),
        tls_options.get("sslKey"),
    )


def _bound(options: Mapping[str, str], offsets: str, timestamp: str) -> StartText:
    if offsets in options and timestamp in options:
        raise OptionInvalid(f"{offsets} and {timestamp} are both given", hint="Set one of them")
    if timestamp in options:
        bound = parse_bound(options[timestamp])
        if bound.time_us is None:
            raise OptionInvalid(
                f"{timestamp} {options[timestamp]!r} is no time", hint="Write 2026-11-21T08:00:00Z"
            )
        return bound
    text = options.get(offsets)
    if text is None:
        return None
    if text.strip().lower() in (EARLIEST, LATEST):
        return text.strip().lower()
    if text.lstrip().startswith("{"):
        return Offset.from_text(text)
    return parse_bound(text)


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names, unparsed = [], text.strip()
    while unparsed:
        if unparsed.startswith("`"):
            name, closed, unparsed = unparsed[1:].partition("`")
            if not closed:
                raise OptionInvalid("columns has an open backtick", hint="Write `odd,name`,other")
            _, _, unparsed = unparsed.partition(",")
        else:
            name, _, unparsed = unparsed.partition(",")
        names.append(name.strip())
        unparsed = unparsed.strip()
    if not names or not all(names):
        raise OptionInvalid("columns names no column", hint="Write columns as id,status,total")
    return tuple(names)


def _count(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    number, unit = text.strip().lower(), ""
    if number and not number[-1].isdigit():
        number, unit = number.rstrip("bkmgt"), number[len(number.rstrip("bkmgt")) :]
    unit = unit.removesuffix("b") if len(unit) > 1 else unit
    if not number.strip().isdecimal() or unit not in _SIZES or int(number) * _SIZES[unit] < 1:
        raise OptionInvalid(f"{name} {text!r} is not a count", hint=f"Write {name} as 1000000 or 64m")
    return int(number) * _SIZES[unit]


def _flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = options.get(name)
    if text is None:
        return default
    if text.strip().lower() not in ("true", "false"):
        raise OptionInvalid(f"{name} {text!r} is neither true nor false")
    return text.strip().lower() == "true"


def bound_of(text: StartText) -> Bound | None:
    """Return the bound of a batch read, None for the earliest position or the head."""
    if isinstance(text, Offset):
        return Bound(position=text.position)
    return text if isinstance(text, Bound) else None


def check_schemas_file(settings: ReadSettings) -> None:
    """Raise OptionInvalid if the schema file does not exist."""
    if settings.schemas is not None and not Path(settings.schemas).is_file():
        raise OptionInvalid(f"schemas: there is no file {settings.schemas}")
