# SPDX-License-Identifier: Apache-2.0
"""Sinks with one index per table and one document per row, which contains the version of the row's last
change.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import pyarrow
import pyarrow.compute as pc
from pydantic import Field

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid, SchemaChanged
from penstock.model import Secret
from penstock.settings.values import Bytes
from penstock.sinks.document.document_sink import DocumentSink, DocumentWriter
from penstock.sinks.endpoint import Endpoint
from penstock.sinks.images import puts, unrepresentable_counts
from penstock.sinks.search.client import SearchClient
from penstock.sinks.search.documents import (
    VERSION,
    check_columns,
    delete_lines,
    holds,
    index_lines,
    mapping,
    rows_of_sources,
)
from penstock.sinks.sink import HINT_GONE, BatchMark, Evolution, Finding, Receipt, Writer
from penstock.sinks.sql.table_owner import comment_of, owner_of

_BYTES_DEFAULT = 32 << 20
_DOCUMENTS_AT_ONCE = 5_000
_SCROLL = "5m"
# The mapping's metadata key that holds the pipeline that created an index.
_OWNER = "penstock"
# Characters that are not allowed in index names.
_NOT_IN_NAMES = str.maketrans(dict.fromkeys('\\/*?"<>| ,#:', "_"))


class SearchSettings(Endpoint):
    """A cluster, and how its indices are named and written."""

    url: str = Field(
        default="http://127.0.0.1:9200",
        description="http://host:9200 or https://; several separated by commas",
    )
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
    connections: int = Field(
        default=2, ge=1, le=64, description="requests that a writer of a batch sends at the same time"
    )


class SearchSink(DocumentSink[SearchClient]):
    """Writes documents."""

    settings: SearchSettings
    reads_ranges = False
    # The product's name, and the sink kind of the other product.
    product: str
    other_kind: str

    @property
    def api_key(self) -> Secret | None:
        """An API key that replaces the account."""
        return None

    def connect(self) -> SearchClient:
        return SearchClient(self.product, self.kind, self.settings, self.password, self.api_key)

    def check(self) -> Sequence[Finding]:
        self.client.request("GET", None, "/_cluster/health")
        if self.client.is_elasticsearch() == (self.kind == "elasticsearch"):
            return []
        return [Finding(self.settings.url, f"is not {self.product}", mend=f"Use the sink {self.other_kind}")]

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
            self.client.request("PUT", index, "", self._index_body(target), accepted=[400])
            # Another pipeline may have created the index since the check, so read its properties.
            existing = self._properties(target) or {}
        missing = self._missing(target, existing, evolution)
        if missing:
            self.client.request("PUT", index, "/_mapping", {"properties": missing})

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
        return _Writer(self, self.settings.gather_bytes, self.settings.connections)

    def commit(self, mark: BatchMark, receipts: Sequence[Receipt]) -> None:
        # Another task may have written rows since this task started, and those rows may be older than the
        # statement that empties the table.
        for index, version in (staged for receipt in receipts for staged in receipt.staged):
            before = {"range": {VERSION: {"lte": version}}}
            for hits in self._hits(index, before, source=False):
                lines = [
                    json.dumps(
                        {"delete": {"_id": hit["_id"], "version": version, "version_type": "external_gte"}}
                    )
                    for hit in hits
                ]
                self.client.bulk(index, "\n".join(lines).encode(), self.settings.refresh)

    def read(
        self, target: Target, low: Mapping[str, Any] | None = None, high: Mapping[str, Any] | None = None
    ) -> Iterator[pyarrow.RecordBatch]:
        for hits in self._hits(self.index(target), {"match_all": {}}, source=True):
            rows = rows_of_sources(target, [hit["_source"] for hit in hits])
            kept = _within(target, rows, low, high)
            if kept.num_rows:
                yield kept

    def _mappings(self, target: Target) -> dict[str, Any] | None:
        described = self.client.request("GET", self.index(target), "/_mapping", accepted=[404])
        if described is None:
            return None
        [index] = described.values()
        mappings: dict[str, Any] = index["mappings"]
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
        self.client.request("POST", index, "/_refresh")
        return bool(self.client.request("GET", index, "/_count")["count"])

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
        self.client.request("POST", index, "/_refresh")
        search = {"query": query, "_source": source, "sort": ["_doc"], "size": _DOCUMENTS_AT_ONCE}
        page = self.client.request("POST", index, f"/_search?scroll={_SCROLL}", search)
        try:
            while hits := page["hits"]["hits"]:
                yield hits
                scroll = {"scroll": _SCROLL, "scroll_id": page["_scroll_id"]}
                page = self.client.request("POST", None, "/_search/scroll", scroll)
        finally:
            scroll = {"scroll_id": page["_scroll_id"]}
            self.client.request("DELETE", None, "/_search/scroll", scroll, accepted=[404])


class _Writer(DocumentWriter[SearchClient]):
    """Writes by bulk requests."""

    def __init__(self, sink: SearchSink, gather_bytes: int, connections: int) -> None:
        super().__init__(sink, gather_bytes, connections)
        self._sink = sink
        self._names: dict[Target, list[str]] = {}

    def empty(self, target: Target, version: int) -> None:
        self._staged.append((self._sink.index(target), version))

    def _write(self, target: Target, rows: pyarrow.Table) -> None:
        if target not in self._names:
            existing = self._sink._properties(target)
            if existing is None:
                # The server would create an index with a default mapping, and searches would find nothing.
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
        index, refresh = self._sink.index(target), self._sink.settings.refresh

        def send(body: bytes) -> tuple[int, int]:
            return len(body), self._client.bulk(index, body, refresh)

        for size, outdated in self._send_all(send, bodies):
            self._bytes += size
            self._outdated += outdated


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
