# SPDX-License-Identifier: Apache-2.0
"""MongoDB: one collection per table and one document per row, with the primary key as `_id`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.compute as pc
from pydantic import Field

from penstock.changes import Target
from penstock.errors import (
    AuthenticationFailed,
    ConnectionLost,
    OptionInvalid,
    PenstockError,
    PrivilegeMissing,
    SchemaChanged,
    ServerBusy,
    ServerUnsupported,
    ValueMalformed,
)
from penstock.model import Secret
from penstock.settings.values import Bytes
from penstock.sinks.document.document_sink import DocumentSink, DocumentWriter
from penstock.sinks.endpoint import Endpoint
from penstock.sinks.images import puts, unrepresentable_counts
from penstock.sinks.mongodb.documents import (
    KEY,
    VERSION,
    check_columns,
    delete_statements,
    key_document,
    rows_of_documents,
    update_statements,
)
from penstock.sinks.sink import (
    BatchMark,
    Evolution,
    Finding,
    Receipt,
    Writer,
    applications_of,
    extra_missing,
)

if TYPE_CHECKING:
    import pymongo

EXTRA = "mongodb"

_BYTES_DEFAULT = 32 << 20
_SELECT_MILLISECONDS_MAX = 10_000
_ROWS_AT_ONCE = 10_000
# The collection that records, for each collection of its database, which pipelines have prepared it.
_PIPELINES = "penstock_pipelines"

_GRANT = "Grant the account readWrite on the database"
# How MongoDB's error numbers are translated.
_BY_NUMBER: dict[int, tuple[type[PenstockError], str]] = {
    18: (AuthenticationFailed, "Check user and password of the sink, and authSource in its URL"),
    13: (PrivilegeMissing, _GRANT),
    121: (ValueMalformed, "The collection's validator is in the way: change it, or filter such rows"),
    10334: (ValueMalformed, "A document has 16 MB at most: leave large columns out by a map step"),
    11000: (OptionInvalid, "A unique index of the collection is in the way: drop it"),
    **dict.fromkeys(
        (6, 7, 50, 64, 89, 91, 112, 189, 262, 9001, 10107, 11600), (ServerBusy, "The batch is tried again")
    ),
}


class Settings(Endpoint):
    """A MongoDB server, replica set or cluster."""

    url: str = Field(
        default="mongodb://127.0.0.1:27017", description="mongodb://host:port,host:port/?replicaSet=name"
    )
    database: str | None = Field(
        default=None,
        min_length=1,
        description="the target database; default: the source database's name",
    )
    gather_bytes: Bytes = Field(
        default=_BYTES_DEFAULT, ge=1, description="bytes of rows to buffer before a write"
    )
    connections: int = Field(
        default=2, ge=1, le=64, description="commands that a writer of a batch sends at the same time"
    )


def _owner(pipeline: str, collection: str) -> str:
    return f"{applications_of(pipeline)}{collection}"


class MongoSink(DocumentSink["pymongo.MongoClient[Any]"]):
    """Writes documents to a MongoDB server."""

    settings: Settings
    kind = "mongodb"

    def connect(self) -> "pymongo.MongoClient[Any]":
        return connect(self.settings, self.password)

    def check(self) -> Sequence[Finding]:
        with translate_errors():
            self.client.admin.command("ping")
        return []

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        check_columns(target)
        database, collection = self.location(target)
        with translate_errors():
            existing = self.client[database].list_collection_names(filter={"name": collection})
        return [] if existing else [f"create collection {database}.{collection}"]

    def prepare(self, target: Target, evolution: Evolution) -> None:
        database, collection = self.location(target)
        self._check_key(target)
        if self.plan(target, evolution):
            with translate_errors():
                self.client[database].create_collection(collection, check_exists=False)
        with translate_errors():
            owner = _owner(self.pipeline, collection)
            self.client[database][_PIPELINES].replace_one({KEY: owner}, {KEY: owner}, upsert=True)

    def remembers(self, pipeline: str, targets: Sequence[Target]) -> bool:
        """Look for documents in collections that the pipeline prepared."""
        collections = [
            (collection, self.client[database]) for database, collection in map(self.location, targets)
        ]
        with translate_errors():
            return any(
                database[_PIPELINES].find_one({KEY: _owner(pipeline, collection)}) is not None
                and database[collection].find_one({}) is not None
                for collection, database in collections
            )

    def _check_key(self, target: Target) -> None:
        """Raise SchemaChanged if the field names in the `_id` of stored documents differ from the names of
        the key's columns. Nothing would ever replace or delete such documents.
        """
        database, collection = self.location(target)
        with translate_errors(f"{database}.{collection}"):
            document = self.client[database][collection].find_one({}, {KEY: 1})
        if document is None:
            return
        key, wanted = document[KEY], target.primary_key
        names = tuple(key) if isinstance(key, dict) else None
        if names != (wanted if len(wanted) > 1 else None):
            raise SchemaChanged(
                f"documents of {database}.{collection} have another key than {', '.join(wanted)}",
                hint=f"Drop the collection, then run penstock resnapshot for {target.name}",
            )

    def location(self, target: Target) -> tuple[str, str]:
        """Return the database and the collection of a target."""
        return self.settings.database or target.name.database, target.name.table

    def open(self, mark: BatchMark, part: int) -> Writer:
        return _Writer(self, self.settings.gather_bytes, self.settings.connections)

    def commit(self, mark: BatchMark, receipts: Sequence[Receipt]) -> None:
        # Another task may have written rows since this task started, and those rows may be older than the
        # statement that empties the table.
        for database, collection, version in (staged for receipt in receipts for staged in receipt.staged):
            with translate_errors(f"{database}.{collection}"):
                self.client[database][collection].delete_many({VERSION: {"$lte": version}})

    def read(
        self, target: Target, low: Mapping[str, Any] | None = None, high: Mapping[str, Any] | None = None
    ) -> Iterator[pyarrow.RecordBatch]:
        import bson

        bounds = {
            comparison: bson.decode(key_document(target, dict(bound)))[KEY]
            for comparison, bound in (("$gte", low), ("$lt", high))
            if bound is not None
        }
        database, collection = self.location(target)
        projection = dict.fromkeys(target.column_names, 1)
        with translate_errors(f"{database}.{collection}"):
            cursor = self.client[database][collection].find({KEY: bounds} if bounds else {}, projection)
            documents: list[Any] = []
            for document in cursor:
                documents.append(document)
                if len(documents) == _ROWS_AT_ONCE:
                    yield rows_of_documents(target, documents)
                    documents = []
        if documents:
            yield rows_of_documents(target, documents)


make = MongoSink


class _Writer(DocumentWriter["pymongo.MongoClient[Any]"]):
    """Writes documents by the server's update and delete commands."""

    def __init__(self, sink: MongoSink, gather_bytes: int, connections: int) -> None:
        super().__init__(sink, gather_bytes, connections)
        self._sink = sink

    def empty(self, target: Target, version: int) -> None:
        self._staged.append((*self._sink.location(target), version))

    def _write(self, target: Target, rows: pyarrow.Table) -> None:
        is_written = puts(rows)
        deleted, written = rows.filter(pc.invert(is_written)), rows.filter(is_written)
        # Delete first, so that unique indexes have room for the new documents.
        if deleted.num_rows:
            self._run(target, "delete", "deletes", delete_statements(target, deleted))
        if written.num_rows:
            self._unrepresentable += unrepresentable_counts(target, written)
            self._run(target, "update", "updates", update_statements(target, written))

    def _run(self, target: Target, verb: str, what: str, commands: Iterator[pyarrow.Buffer]) -> None:
        import bson
        from bson.raw_bson import RawBSONDocument

        database, collection = self._sink.location(target)
        options = bson.CodecOptions(document_class=RawBSONDocument)
        concern = self._client.write_concern.document
        location = f"{database}.{collection}"

        def send(statements: pyarrow.Buffer) -> int:
            command = {
                verb: collection,
                what: bson.decode_all(statements.to_pybytes(), options),
                "ordered": False,
            }
            with translate_errors(location):
                answer = self._client[database].command(
                    command | ({"writeConcern": concern} if concern else {})
                )
            for problem in answer.get("writeErrors", ()):
                raise refusal(problem["code"], problem["errmsg"], location)
            if "writeConcernError" in answer:
                problem = answer["writeConcernError"]
                raise refusal(problem["code"], problem["errmsg"], location)
            return int(statements.size)

        self._bytes += sum(self._send_all(send, commands))


def library() -> Any:
    """Return the package `pymongo`. Raises DependencyMissing."""
    try:
        import pymongo
    except ImportError as problem:
        raise extra_missing("pymongo", "mongodb") from problem
    return pymongo


def connect(endpoint: Endpoint, password: Secret | None) -> "pymongo.MongoClient[Any]":
    """Return a client, which connects on first use. Raises OptionInvalid, DependencyMissing."""
    package = library()
    options: dict[str, Any] = {"serverSelectionTimeoutMS": _SELECT_MILLISECONDS_MAX}
    if endpoint.user is not None:
        options |= {"username": endpoint.user, "password": password.reveal() if password else ""}
    if endpoint.ca is not None:
        options |= {"tls": True, "tlsCAFile": str(endpoint.ca)}
    try:
        client: pymongo.MongoClient[Any] = package.MongoClient(endpoint.url, **options)
        return client
    except (package.errors.ConfigurationError, ValueError) as problem:
        raise OptionInvalid(
            f"{endpoint.url!r} is no MongoDB server: {problem}", hint="Write mongodb://host:27017"
        ) from problem


@contextmanager
def translate_errors(location: str | None = None) -> Iterator[None]:
    """Translate the client's exceptions into Penstock errors."""
    errors = library().errors
    try:
        yield
    except (errors.ConnectionFailure, errors.WaitQueueTimeoutError) as problem:
        # The driver appends its timeouts and everything that it knows about each server, so remove that text.
        why = re.sub(r" \(configured timeouts: [^)]*\)|, Timeout: .*", "", str(problem), flags=re.DOTALL)
        raise ConnectionLost(f"MongoDB does not answer: {why}", position=location) from problem
    except errors.OperationFailure as problem:
        raise refusal(problem.code or 0, str(problem), location) from problem
    except errors.PyMongoError as problem:
        raise ServerUnsupported(f"MongoDB's client cannot go on: {problem}", position=location) from problem


def refusal(number: int, message: str, location: str | None) -> PenstockError:
    """Return the error for an error number of MongoDB."""
    kind, hint = _BY_NUMBER.get(number, (ServerUnsupported, "See the message"))
    return kind(f"MongoDB answers: {message}", position=location, hint=hint)
