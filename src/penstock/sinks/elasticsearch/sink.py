# SPDX-License-Identifier: Apache-2.0
"""Elasticsearch: one index per table and one document per row, with the version of the row's last change."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import pyarrow
import pyarrow.compute as pc
from pydantic import Field

from penstock.changes import Changes, Target
from penstock.errors import (
    AuthenticationFailed,
    ConnectionLost,
    OptionInvalid,
    PenstockError,
    PrivilegeMissing,
    SchemaChanged,
    ServerBusy,
    ServerUnsupported,
    TlsFailed,
    ValueMalformed,
)
from penstock.model import Secret
from penstock.settings.values import Bytes, SecretText
from penstock.sinks.document.document_sink import DocumentSink, DocumentWriter
from penstock.sinks.elasticsearch.documents import (
    VERSION,
    Number,
    check_columns,
    delete_lines,
    holds,
    index_lines,
    mapping,
    rows_of_sources,
)
from penstock.sinks.endpoint import Endpoint
from penstock.sinks.images import puts, unrepresentable_counts
from penstock.sinks.sink import (
    HINT_GONE,
    BatchMark,
    Evolution,
    Finding,
    Receipt,
    Writer,
    extra_missing,
)
from penstock.sinks.sql.table_owner import comment_of, owner_of

if TYPE_CHECKING:
    import elasticsearch

EXTRA = "elasticsearch"

_BYTES_DEFAULT = 32 << 20
_ANSWER_SECONDS_MAX = 120.0
_DOCUMENTS_AT_ONCE = 5_000
_SCROLL = "5m"
# The mapping's metadata key that holds the pipeline that created an index.
_OWNER = "penstock"
# Characters that are not allowed in index names.
_NOT_IN_NAMES = str.maketrans(dict.fromkeys('\\/*?"<>| ,#:', "_"))

# Elasticsearch's error types. A version conflict means that a later change was written before.
_CONFLICT = "version_conflict_engine_exception"
_PASSING = ("es_rejected_execution_exception", "unavailable_shards_exception", "cluster_block_exception")
_OF_VALUES = (
    "document_parsing_exception",
    "mapper_parsing_exception",
    "illegal_argument_exception",
    "strict_dynamic_mapping_exception",
)
_OF_INDICES = ("index_not_found_exception", "index_closed_exception")


class Settings(Endpoint):
    """An Elasticsearch cluster."""

    url: str = Field(
        default="http://127.0.0.1:9200",
        description="http://host:9200 or https://; several separated by commas",
    )
    api_key: SecretText | None = Field(default=None, description="an API key, instead of user and password")
    index: str = Field(
        default="{database}.{table}",
        description="the index name: a template of {database} and {table}; it becomes lower case",
    )
    refresh: Literal["no", "wait", "now"] = Field(
        default="no", description="no: return at once; wait: wait for the next refresh; now: force a refresh"
    )
    gather_bytes: Bytes = Field(
        default=_BYTES_DEFAULT, ge=1, description="bytes of rows to buffer before a write"
    )


class ElasticsearchSink(DocumentSink["elasticsearch.Elasticsearch"]):
    """Writes documents of an Elasticsearch cluster."""

    settings: Settings
    kind = "elasticsearch"
    reads_ranges = False

    def connect(self) -> "elasticsearch.Elasticsearch":
        return connect(self.settings, self.password)

    def check(self) -> Sequence[Finding]:
        with translate_errors():
            self.client.cluster.health()
        return []

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        check_columns(target)
        existing = self._properties(target)
        if existing is None:
            return [f"PUT /{self.index(target)} {json.dumps(self._index_body(target))}"]
        missing = self._missing(target, existing, evolution)
        return (
            [f"PUT /{self.index(target)}/_mapping {json.dumps({'properties': missing})}"] if missing else []
        )

    def prepare(self, target: Target, evolution: Evolution) -> None:
        check_columns(target)
        index, existing = self.index(target), self._properties(target)
        if existing is None:
            with translate_errors(index):
                self.client.options(ignore_status=400).indices.create(index=index, **self._index_body(target))
            # Another pipeline may have created the index in the meantime.
            existing = self._properties(target) or {}
        missing = self._missing(target, existing, evolution)
        if missing:
            with translate_errors(index):
                self.client.indices.put_mapping(index=index, properties=missing)

    def remembers(self, pipeline: str, targets: Sequence[Target]) -> bool:
        """Look for documents in indices that the pipeline created, according to their mappings."""
        indices = [self.index(target) for target in targets if self._owner(target) == pipeline]
        return any(self._has_documents(index) for index in indices)

    def index(self, target: Target) -> str:
        """Return the name of a target's index. Raises OptionInvalid."""
        name = target.name
        try:
            index_name = self.settings.index.format(database=name.database, table=name.table)
        except (KeyError, IndexError, ValueError) as problem:
            raise OptionInvalid(
                f"the index's name {self.settings.index!r} has something else than {{database}} and {{table}}"
            ) from problem
        return index_name.lower().translate(_NOT_IN_NAMES).lstrip("-_+.")

    def open(self, mark: BatchMark, part: int) -> Writer:
        return _Writer(self, self.settings.gather_bytes)

    def commit(self, mark: BatchMark, receipts: Sequence[Receipt]) -> None:
        # Another task may have written rows from before the table was emptied, and later than this one.
        for index, version in (staged for receipt in receipts for staged in receipt.staged):
            before = {"range": {VERSION: {"lte": version}}}
            for hits in self._hits(index, before, source=False):
                lines = [
                    json.dumps(
                        {"delete": {"_id": hit["_id"], "version": version, "version_type": "external_gte"}}
                    )
                    for hit in hits
                ]
                send(self.client, index, "\n".join(lines).encode(), self.settings.refresh)

    def read(
        self, target: Target, low: Mapping[str, Any] | None = None, high: Mapping[str, Any] | None = None
    ) -> Iterator[pyarrow.RecordBatch]:
        for hits in self._hits(self.index(target), {"match_all": {}}, source=True):
            rows = rows_of_sources(target, [hit["_source"] for hit in hits])
            kept = _within(target, rows, low, high)
            if kept.num_rows:
                yield kept

    def _mappings(self, target: Target) -> dict[str, Any] | None:
        index = self.index(target)
        with translate_errors(index):
            response = self.client.options(ignore_status=404).indices.get_mapping(index=index)
        if response.meta.status == 404:
            return None
        [described] = response.body.values()
        mappings: dict[str, Any] = described["mappings"]
        return mappings

    def _properties(self, target: Target) -> dict[str, Any] | None:
        mappings = self._mappings(target)
        return None if mappings is None else mappings.get("properties", {})

    def _index_body(self, target: Target) -> dict[str, Any]:
        owner = {_OWNER: comment_of(self.pipeline)}
        return {"mappings": {"dynamic": False, "_meta": owner, "properties": mapping(target)}}

    def _owner(self, target: Target) -> str | None:
        mappings = self._mappings(target) or {}
        return owner_of(mappings.get("_meta", {}).get(_OWNER))

    def _has_documents(self, index: str) -> bool:
        with translate_errors(index):
            self.client.indices.refresh(index=index)
            return bool(self.client.count(index=index).body["count"])

    def _missing(self, target: Target, existing: Mapping[str, Any], evolution: Evolution) -> dict[str, Any]:
        """Return the properties to add to an index. Raises SchemaChanged."""
        wanted = mapping(target)
        missing = {name: field for name, field in wanted.items() if name not in existing}
        mismatched = [
            name for name, field in wanted.items() if name in existing and not holds(existing[name], field)
        ]
        if evolution is Evolution.IGNORE:
            return {VERSION: missing[VERSION]} if VERSION in missing else {}
        if mismatched or (missing and evolution is Evolution.STOP):
            names = ", ".join(mismatched or missing)
            raise SchemaChanged(
                f"the index {self.index(target)} does not map {names} as the columns of {target.name} are",
                hint="Delete the index, or name another one, then run penstock resnapshot for the table",
            )
        return missing

    def _hits(self, index: str, query: Mapping[str, Any], source: bool) -> Iterator[list[Any]]:
        """Yield the documents that match a query, in pages."""
        with translate_errors(index):
            self.client.indices.refresh(index=index)
            page = self.client.search(
                index=index,
                query=query,
                source=source,
                sort=["_doc"],
                size=_DOCUMENTS_AT_ONCE,
                scroll=_SCROLL,
            )
        try:
            while hits := page["hits"]["hits"]:
                yield hits
                with translate_errors(index):
                    page = self.client.scroll(scroll_id=page["_scroll_id"], scroll=_SCROLL)
        finally:
            with translate_errors(index):
                self.client.options(ignore_status=404).clear_scroll(scroll_id=page["_scroll_id"])


make = ElasticsearchSink


class _Writer(DocumentWriter["elasticsearch.Elasticsearch"]):
    """Writes by bulk requests."""

    def __init__(self, sink: ElasticsearchSink, gather_bytes: int) -> None:
        super().__init__(sink, gather_bytes)
        self._sink = sink
        self._names: dict[Target, list[str]] = {}

    def empty(self, target: Target, version: int) -> None:
        self._staged.append((self._sink.index(target), version))

    def _write(self, target: Target, rows: pyarrow.Table) -> None:
        if target not in self._names:
            existing = self._sink._properties(target)
            if existing is None:
                # The server would create an index with a mapping of its own, and searches would find nothing.
                raise SchemaChanged(
                    f"the target has no index {self._sink.index(target)} any more", hint=HINT_GONE
                )
            self._names[target] = [name for name in target.column_names if name in existing]
        self._unrepresentable += unrepresentable_counts(target, rows.filter(puts(rows)))
        for batch in rows.to_batches():
            is_written = puts(batch)
            deleted, written = batch.filter(pc.invert(is_written)), batch.filter(is_written)
            if deleted.num_rows:
                self._send(target, delete_lines(Changes(target, deleted, target.name)))
            if written.num_rows:
                self._send(target, index_lines(Changes(target, written, target.name), self._names[target]))

    def _send(self, target: Target, bodies: Iterator[bytes]) -> None:
        for body in bodies:
            self._bytes += len(body)
            self._outdated += send(self._client, self._sink.index(target), body, self._sink.settings.refresh)


def send(client: "elasticsearch.Elasticsearch", index: str, body: bytes, refresh: str) -> int:
    """Send a bulk request, and return the number of rows that have a later version in the index.

    Raises the errors of the response.
    """
    wait: Any = {"no": False, "wait": "wait_for", "now": True}[refresh]
    lines: Any = [body]
    with translate_errors(index):
        answer = client.bulk(
            index=index, operations=lines, refresh=wait, filter_path=["errors", "items.*.error"]
        )
    if not answer.get("errors"):
        return 0
    for operation in answer["items"]:
        [[_, outcome]] = operation.items()
        kind, reason = outcome["error"]["type"], outcome["error"].get("reason", "")
        if kind != _CONFLICT:
            raise _refusal(kind, reason, index)
    return len(answer["items"])


def connect(settings: Settings, password: Secret | None) -> "elasticsearch.Elasticsearch":
    """Return a client, which connects on first use. Raises OptionInvalid, DependencyMissing."""
    try:
        import elasticsearch
        from elastic_transport import JsonSerializer
    except ImportError as problem:
        raise extra_missing("elasticsearch", "elasticsearch") from problem

    class Exact(JsonSerializer):
        """Parses numbers with all their digits."""

        mimetype = "application/vnd.elasticsearch+json"

        def json_loads(self, data: bytes | str) -> Any:
            return json.loads(data, parse_float=Number)

    options: dict[str, Any] = {}
    if settings.api_key is not None:
        options["api_key"] = settings.api_key.reveal()
    elif settings.user is not None:
        options["basic_auth"] = (settings.user, password.reveal() if password else "")
    if settings.ca is not None:
        options["ca_certs"] = str(settings.ca)
    try:
        return elasticsearch.Elasticsearch(
            settings.url.split(","),
            request_timeout=_ANSWER_SECONDS_MAX,
            serializers={Exact.mimetype: Exact()},
            **options,
        )
    except ValueError as problem:
        raise OptionInvalid(
            f"{settings.url!r} is no Elasticsearch server: {problem}", hint="Write http://host:9200"
        ) from problem


@contextmanager
def translate_errors(location: str | None = None) -> Iterator[None]:
    """Translate the client's exceptions into Penstock errors."""
    import elastic_transport
    import elasticsearch

    try:
        yield
    except elastic_transport.TlsError as problem:
        raise TlsFailed(
            f"no TLS with Elasticsearch: {problem}", hint="Set ca to its authority's file"
        ) from problem
    except elastic_transport.TransportError as problem:
        raise ConnectionLost(f"Elasticsearch does not answer: {problem}", position=location) from problem
    except elasticsearch.ApiError as problem:
        raise _api_error(problem.status_code, problem.error, str(problem), location) from problem
    except elasticsearch.UnsupportedProductError as problem:
        raise ServerUnsupported(f"this is not Elasticsearch: {problem}", position=location) from problem


def _api_error(status: int, kind: str, message: str, location: str | None) -> PenstockError:
    if status == 401:
        return AuthenticationFailed(
            f"Elasticsearch answers: {message}", hint="Check user, password and api_key"
        )
    if status == 403 and kind not in _PASSING:
        return PrivilegeMissing(
            f"Elasticsearch answers: {message}",
            position=location,
            hint="Grant create_index, manage, read and write",
        )
    if status in (429, 502, 503, 504):
        return ServerBusy(f"Elasticsearch answers: {message}", position=location)
    return _refusal(kind, message, location)


def _refusal(kind: str, message: str, location: str | None) -> PenstockError:
    if kind in _PASSING:
        return ServerBusy(f"Elasticsearch answers: {kind}: {message}", position=location)
    if kind in _OF_INDICES:
        return SchemaChanged(f"Elasticsearch answers: {kind}: {message}", position=location, hint=HINT_GONE)
    if kind in _OF_VALUES:
        return ValueMalformed(
            f"Elasticsearch cannot index a document: {message}",
            position=location,
            hint="Map the field otherwise in the index, or set errors: {table: skip_table}",
        )
    return ServerUnsupported(f"Elasticsearch answers: {kind}: {message}", position=location)


def _within(
    target: Target, rows: pyarrow.RecordBatch, low: Mapping[str, Any] | None, high: Mapping[str, Any] | None
) -> pyarrow.RecordBatch:
    """Return the rows with keys in a range."""
    for bound, wanted in ((low, True), (high, False)):
        if bound is not None:
            rows = rows.filter(pc.equal(_not_below(target, rows, bound), wanted))
    return rows


def _not_below(target: Target, rows: pyarrow.RecordBatch, bound: Mapping[str, Any]) -> pyarrow.Array:
    """Return a mask of the rows with keys at or above a bound."""
    mask = pyarrow.repeat(True, rows.num_rows)
    for name in reversed(target.primary_key):
        column, value = rows.column(name), pyarrow.scalar(bound[name], rows.column(name).type)
        mask = pc.or_(pc.greater(column, value), pc.and_(pc.equal(column, value), mask))
    return mask
