# SPDX-License-Identifier: Apache-2.0
"""Converts Bifrost's exported configuration into pipelines, one for each pair of data source and target.

The file is the JSON of `Backup - Export`. `DbInfo` lists the data sources with their tables. Each table lists
its synchronisations to targets (`ToServerList`), each with its last successful position. `ToServer` holds the
targets' connections.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import OptionInvalid
from penstock.migrate.bifrost_reference import (
    DATA_SOURCE,
    EXPORT,
    PLUGIN_PARAMETERS,
    SYNCHRONISATION,
    TABLE,
    TARGET,
)
from penstock.migrate.bifrost_targets import sink_of
from penstock.migrate.nested_text import parse_json
from penstock.migrate.output import Migration
from penstock.migrate.property_files import number_of, read_text
from penstock.migrate.report import OriginalProperties
from penstock.migrate.table_filters import literal

_SPLIT = "_-"
# A prefix of tables: orders_*
_WILDCARD = re.compile(r"[0-9A-Za-z_$]+\*")
_ALL_DATABASES, _ALL_TABLES = "AllDataBases", "AllTables"
# The connection of a data source or a target: user, password, network address and the rest.
_DSN = re.compile(
    r"(?:(?P<user>[^:@]*)(?::(?P<password>.*))?@)?(?:tcp)?\(?(?P<host>[^()/]+?)\)?(?:/(?P<rest>.*))?$"
)


@dataclass(frozen=True)
class _Selection:
    """The tables of one entry of the original, as pairs of patterns of databases and tables."""

    location: str
    tables: list[tuple[str, str]]
    exclude: list[tuple[str, str]]

    def overlaps(self, other: "_Selection") -> bool:
        """Return whether both entries may concern the same table: both select it, or one selects it and the
        other excludes it.
        """
        return any(
            _have_common_names(database, other_database) and _have_common_names(table, other_table)
            for selection, exclusion in ((self, other), (other, self))
            for database, table in selection.tables
            for other_database, other_table in (*exclusion.tables, *exclusion.exclude)
        )


@dataclass
class _Pipeline:
    """A pipeline for the tables of a data source that have the same target."""

    selections: list["_Selection"] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    positions: list[Mapping[str, Any]] = field(default_factory=list)
    synchronisations: list[OriginalProperties] = field(default_factory=list)


def migrate_bifrost(path: Path, migration: Migration) -> None:
    """Add the pipelines of an export. Raises OptionInvalid."""
    export = _object(path)
    whole = _properties(migration, path.name, export, EXPORT)
    targets = {
        name: _properties(migration, f"ToServer {name}", target, TARGET)
        for name, target in _objects(export, "ToServer").items()
    }
    for name, source in _objects(export, "DbInfo").items():
        properties = _properties(migration, f"DbInfo {name}", source, DATA_SOURCE)
        if properties.get("InputType", "mysql").lower() != "mysql":
            properties.not_carried("InputType", remark="Penstock reads MySQL and MariaDB")
        else:
            _add_source(migration, name, source, properties, targets)
        properties.account_for_the_rest()
    whole.carried("ToServer", "DbInfo")
    whole.account_for_the_rest()
    for target in targets.values():
        target.account_for_the_rest()
    if not migration.pipelines:
        raise OptionInvalid(
            f"{path} has no table of MySQL with a target",
            hint="Export the configuration of a running Bifrost",
        )
    files = " and ".join(migration.pipelines)
    migration.report.steps += [
        "Stop the data sources in Bifrost before the export: positions are those of the export.",
        f"Run penstock run with each of {files}; add load: full where a target is to be filled again.",
    ]


def _add_source(
    migration: Migration,
    name: str,
    source: Mapping[str, Any],
    properties: OriginalProperties,
    targets: Mapping[str, OriginalProperties],
) -> None:
    server = _server(migration, name, properties)
    pipelines: dict[str, _Pipeline] = {}
    for key, table in _objects(source, "TableMap").items():
        _add_table(migration, name, key, table, pipelines)
    properties.carried("Name", "InputType", "TableMap")
    for target_name, pipeline in pipelines.items():
        target = targets.get(target_name)
        if target is None:
            raise OptionInvalid(
                f"DbInfo {name} names the target {target_name}, which the export does not have",
                hint="Export the configuration again",
            )
        start = _start(source, properties, pipeline.positions)
        full_name = _file_name(f"{name}-{target_name}").lstrip(".-")
        if f"{full_name}.yaml" in migration.pipelines:
            raise OptionInvalid(
                f"DbInfo {name} to {target_name}: another data source and target give a pipeline of the same "
                f"name, {full_name}",
                hint="Rename the data source or the target in Bifrost, and export again",
            )
        exclude = _patterns(entry.exclude for entry in pipeline.selections)
        document: dict[str, Any] = {
            "name": full_name,
            "source": {**server, "tables": _patterns(entry.tables for entry in pipeline.selections)}
            | ({"exclude": exclude} if exclude else {})
            | {"start": start},
            "load": "none",
        }
        if pipeline.steps:
            document["steps"] = pipeline.steps
        document["sink"] = sink_of(migration, full_name, target, pipeline.synchronisations)
        for synchronisation in pipeline.synchronisations:
            synchronisation.account_for_the_rest()
        migration.pipelines[f"{full_name}.yaml"] = document


def _file_name(name: str) -> str:
    """Return a name with `_` for characters that names of pipelines and sources cannot have."""
    return re.sub(r"[^0-9A-Za-z_.-]", "_", name)


def _server(migration: Migration, name: str, properties: OriginalProperties) -> dict[str, Any]:
    match = _DSN.match(properties.get("ConnectUri"))
    if match is None:
        raise OptionInvalid(
            f"DbInfo {name}: ConnectUri is not the address of a server",
            hint="It is user:password@tcp(host:3306)/mysql",
        )
    host = match["host"] if ":" in match["host"] else f"{match['host']}:3306"
    server: dict[str, Any] = {"url": f"mysql://{host}", "name": _file_name(name)}
    if match["user"]:
        server["user"] = match["user"]
    server |= migration.secret("password", f"{server['name']}.password", match["password"] or "")
    parameters = (match["rest"] or "").partition("?")[2]
    properties.changed("ConnectUri", remark="source.url", attention=False)
    if re.search(r"\b(ssl|tls)", parameters):
        properties.remind(f"{name}: the source's TLS parameters are not carried: set source.tls.")
    if properties.get("ServerId") not in ("", "0"):
        server["server_id"] = number_of(properties.get("ServerId"))
    properties.carried("ServerId")
    return server


def _add_table(
    migration: Migration, source: str, key: str, table: Mapping[str, Any], pipelines: dict[str, _Pipeline]
) -> None:
    database, _, name = key.partition(_SPLIT) if _SPLIT in key else key.rpartition("-")
    properties = _properties(migration, f"DbInfo {source} {database}.{name}", table, TABLE)
    tables, exclude = _tables(database, name, properties)
    for sync in _synchronisations(table, properties.location):
        location = f"DbInfo {source} {database}.{name} to {sync.get('ToServerKey')}"
        parameters = sync.get("PluginParam") or {}
        values = {**sync, **{f"PluginParam.{option}": value for option, value in parameters.items()}}
        values.pop("PluginParam", None)
        reference = SYNCHRONISATION | PLUGIN_PARAMETERS.get(str(sync.get("PluginName")).lower(), {})
        synchronisation = _properties(migration, location, values, reference)
        pipeline = pipelines.setdefault(str(sync.get("ToServerKey")), _Pipeline())
        selection = _Selection(location, tables, exclude)
        # Refuse entries that overlap, because steps and exclusions apply to the whole pipeline, whichever
        # entry they come from.
        if overlapping := next((entry for entry in pipeline.selections if selection.overlaps(entry)), None):
            raise OptionInvalid(
                f"{location}: {overlapping.location} is about some of the same tables",
                hint="Give one of them a target of its own in Bifrost, and export again",
            )
        pipeline.selections.append(selection)
        pipeline.steps += _steps(_patterns([tables]), parameters, synchronisation)
        pipeline.positions.append(sync)
        pipeline.synchronisations.append(synchronisation)
        synchronisation.carried("ToServerKey", "PluginName", "LastSuccessBinlog", "LastQueueBinlog")
    properties.carried("Name", "ToServerList", "IgnoreTable", "DoTable")
    properties.account_for_the_rest()


def _synchronisations(table: Mapping[str, Any], location: str) -> list[Mapping[str, Any]]:
    """Return the synchronisations of a table. Raises OptionInvalid for an invalid position."""
    synchronisations = table.get("ToServerList") or []
    try:
        for sync in synchronisations:
            for name in ("LastSuccessBinlog", "LastQueueBinlog"):
                _order(sync.get(name) or {})
    except (AttributeError, TypeError, ValueError) as problem:
        raise OptionInvalid(
            f"{location}: ToServerList has a position that cannot be read: {problem}",
            hint="Export the configuration again",
        ) from problem
    return list(synchronisations)


def _tables(
    database: str, name: str, properties: OriginalProperties
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the tables and exclusions that a table name of the original stands for."""
    schema = "*" if database in (_ALL_DATABASES, "*") else literal(database)
    only = [table.strip() for table in properties.get("DoTable").split(",") if table.strip()]
    ignored = [table.strip() for table in properties.get("IgnoreTable").split(",") if table.strip()]
    if only:
        tables = [(schema, literal(table)) for table in only]
    elif name in (_ALL_TABLES, "*"):
        tables = [(schema, "*")]
    else:
        tables = [(schema, name if _WILDCARD.fullmatch(name) else literal(name))]
    return tables, [(schema, literal(table)) for table in ignored]


def _patterns(names: Iterable[Sequence[tuple[str, str]]]) -> list[str]:
    return [f"{database}.{table}" for entry in names for database, table in entry]


def _have_common_names(first: str, second: str) -> bool:
    """Return whether a name can match both patterns, which are literal or have a single `*` at the end."""
    if first.endswith("*") and second.endswith("*"):
        return first.startswith(second[:-1]) or second.startswith(first[:-1])
    for pattern, name in ((first, second), (second, first)):
        if pattern.endswith("*"):
            return name.strip("`").startswith(pattern[:-1])
    return first == second


# --- Positions ------------------------------------------------------------------------------


def _start(
    source: Mapping[str, Any], properties: OriginalProperties, synchronisations: Sequence[Mapping[str, Any]]
) -> str:
    """Return where a target continues.

    The result is the oldest position of all synchronisations that have changes in their queues, so a
    synchronisation that is up to date does not hold back the others. If no queue has changes, the result is
    the position of the data source.
    """
    names = ("BinlogDumpFileName", "BinlogDumpPosition", "IsGtid", "Gtid")
    properties.carried(*names, remark="source.start")
    pending = []
    for sync in synchronisations:
        success, queued = sync.get("LastSuccessBinlog") or {}, sync.get("LastQueueBinlog") or {}
        if _order(queued) > _order(success) and any(_order(success)):
            pending.append(success)
        elif _order(queued) > _order(success):
            # None of the synchronisation's changes are in the target, and its first change has no recorded
            # position.
            return "earliest"
    prefix = str(source.get("BinlogDumpFileName") or "").rpartition(".")[0]
    if pending:
        oldest = min(pending, key=_order)
        if source.get("IsGtid") and oldest.get("GTID"):
            return str(oldest["GTID"])
        _, file, position = _order(oldest)
        return f"{prefix}.{file:06d}:{position}"
    if source.get("IsGtid") and source.get("Gtid"):
        return str(source["Gtid"])
    if not prefix:
        return "latest"
    return f"{source['BinlogDumpFileName']}:{int(source.get('BinlogDumpPosition') or 4)}"


def _order(position: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(position.get(name) or 0) for name in ("EventID", "BinlogFileNum", "BinlogPosition"))


# --- Steps ----------------------------------------------------------------------------------


def _steps(
    tables: list[str], parameters: Mapping[str, Any], synchronisation: OriginalProperties
) -> list[dict[str, Any]]:
    """Return the steps that choose and rename columns, and the target's table."""
    steps: list[dict[str, Any]] = []
    columns = _columns(parameters.get("Field"), synchronisation)
    if columns:
        renamed = {source: target for source, target in columns.items() if source != target}
        step = {"tables": tables, "keep": list(columns)} | ({"rename": renamed} if renamed else {})
        steps.append({"map": step})
        synchronisation.carried("PluginParam.Field", remark="step `map`")
    selected = [str(name) for name in _list_of(synchronisation, "FieldList")]
    if selected and not columns:
        steps.append({"map": {"tables": tables, "keep": selected}})
    synchronisation.carried("FieldList", remark="step `map`")
    schema = str(parameters.get("Schema") or parameters.get("CkSchema") or "")
    table = str(parameters.get("Table") or parameters.get("CkTable") or "")
    if schema or table:
        target = f"{schema or '{database}'}.{table or '{table}'}"
        steps.append({"route": {"tables": tables, "to": target}})
    names = ("Schema", "CkSchema", "Table", "CkTable")
    synchronisation.carried(*(f"PluginParam.{name}" for name in names), remark="step `route`")
    return steps


def _list_of(properties: OriginalProperties, name: str) -> list[Any]:
    """Return a property that is a JSON list; empty if it is not set."""
    try:
        value = parse_json(properties.get(name, "[]"))
    except ValueError as problem:
        raise OptionInvalid(
            f"{name} is not JSON: {problem}", hint="Name a file of Backup - Export"
        ) from problem
    return value if isinstance(value, list) else []


def _columns(fields: Any, synchronisation: OriginalProperties) -> dict[str, str]:
    """Return the mapping from source column to target column; empty if a field is a template."""
    columns = {}
    for entry in fields or []:
        source = str(entry.get("FromMysqlField") or entry.get("MySQL") or "")
        target = str(entry.get("ToField") or entry.get("CK") or "")
        if "{$" in source:
            synchronisation.not_carried("PluginParam.Field", remark="templates: write a `map` step with add")
            return {}
        if source and target:
            columns[source] = target
    return columns


# --- The file -------------------------------------------------------------------------------


def _object(path: Path) -> Mapping[str, Any]:
    try:
        export = parse_json(read_text(path))
    except ValueError as problem:
        raise OptionInvalid(
            f"{path} is not JSON: {problem}", hint="Name a file of Backup - Export"
        ) from problem
    if not isinstance(export, dict) or not isinstance(export.get("DbInfo"), dict):
        raise OptionInvalid(f"{path} has no DbInfo", hint="Name a file of Backup - Export")
    return export


def _objects(values: Mapping[str, Any], name: str) -> dict[str, Mapping[str, Any]]:
    inner = values.get(name) or {}
    if not isinstance(inner, dict) or not all(isinstance(value, dict) for value in inner.values()):
        raise OptionInvalid(f"{name} is not an object of objects", hint="Name a file of Backup - Export")
    return inner


def _properties(
    migration: Migration, location: str, values: Mapping[str, Any], reference: Mapping[str, Any]
) -> OriginalProperties:
    texts = {
        name: value if isinstance(value, str) else "" if value in (None, [], {}) else json.dumps(value)
        for name, value in values.items()
    }
    return OriginalProperties(migration.report, location, texts, reference)
