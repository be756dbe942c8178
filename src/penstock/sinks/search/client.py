# SPDX-License-Identifier: Apache-2.0
"""Requests to an Elasticsearch or OpenSearch cluster, through Elastic's transport, which works with both."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

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
from penstock.sinks.endpoint import Endpoint
from penstock.sinks.search.documents import Number
from penstock.sinks.sink import HINT_GONE, extra_missing

if TYPE_CHECKING:
    import elastic_transport

_ANSWER_SECONDS_MAX = 120.0
_JSON, _LINES = "application/json", "application/x-ndjson"

# The servers' error types. A version conflict means that a later change has already been written.
_CONFLICT = "version_conflict_engine_exception"
_PASSING = (
    "es_rejected_execution_exception",
    "rejected_execution_exception",
    "unavailable_shards_exception",
    "cluster_block_exception",
)
_OF_VALUES = (
    "document_parsing_exception",
    "mapper_parsing_exception",
    "illegal_argument_exception",
    "strict_dynamic_mapping_exception",
)
_OF_INDICES = ("index_not_found_exception", "index_closed_exception")


class SearchClient:
    """A client for an Elasticsearch or OpenSearch cluster, which connects on first use. `product` names the
    server in errors.
    """

    def __init__(
        self, product: str, extra: str, settings: Endpoint, password: Secret | None, api_key: Secret | None
    ) -> None:
        """Raise OptionInvalid, DependencyMissing."""
        self.product = product
        self._transport = _transport(product, extra, settings, _authorization(settings, password, api_key))

    def close(self) -> None:
        """Close the client's connections."""
        self._transport.close()

    def request(
        self,
        method: str,
        index: str | None,
        path: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        accepted: Sequence[int] = (),
    ) -> Any:
        """Return the answer to a request below an index, or None if its status is in `accepted`.

        A body of bytes has several lines. Errors of the server are raised as Penstock errors. Raises
        ServerBusy if documents of some shards are missing from the answer.
        """
        answer = self._answer(method, index, path, body)
        if answer.meta.status in accepted:
            return None
        if answer.meta.status >= 300:
            raise self._error_of(answer.meta.status, answer.body, index)
        shards = answer.body.get("_shards") if isinstance(answer.body, Mapping) else None
        if shards and shards.get("failed"):
            raise ServerBusy(
                f"{self.product} answers without {shards['failed']} of {shards['total']} shards",
                position=index,
            )
        return answer.body

    def is_elasticsearch(self) -> bool:
        """Return whether the server calls itself Elasticsearch."""
        return self._answer("HEAD", None, "/").meta.headers.get("x-elastic-product") == "Elasticsearch"

    def _answer(
        self, method: str, index: str | None, path: str, body: Mapping[str, Any] | bytes | None = None
    ) -> "elastic_transport.TransportApiResponse":
        headers = {"accept": _JSON}
        if body is not None:
            headers["content-type"] = _LINES if isinstance(body, bytes) else _JSON
        target = path if index is None else f"/{quote(index, safe='')}{path}"
        with self._translate_errors(index):
            return self._transport.perform_request(method, target, body=body, headers=headers)

    def bulk(self, index: str, lines: bytes, refresh: str) -> int:
        """Send operations, and return the number of rows that have a later version in the index."""
        wait = {"no": "false", "wait": "wait_for", "now": "true"}[refresh]
        path = f"/_bulk?refresh={wait}&filter_path=errors,items.*.error"
        answer = self.request("POST", index, path, lines + b"\n")
        if not answer.get("errors"):
            return 0
        for operation in answer["items"]:
            [[_, outcome]] = operation.items()
            kind, reason = outcome["error"]["type"], outcome["error"].get("reason", "")
            if kind != _CONFLICT:
                raise self._refusal(kind, reason, index)
        return len(answer["items"])

    @contextmanager
    def _translate_errors(self, index: str | None) -> Iterator[None]:
        import elastic_transport

        try:
            yield
        except elastic_transport.TlsError as problem:
            raise TlsFailed(
                f"no TLS with {self.product}: {problem}", hint="Set ca to its authority's file"
            ) from problem
        except elastic_transport.TransportError as problem:
            raise ConnectionLost(f"{self.product} does not answer: {problem}", position=index) from problem

    def _error_of(self, status: int, body: Any, index: str | None) -> PenstockError:
        error = body.get("error") if isinstance(body, Mapping) else None
        if isinstance(error, Mapping):
            kind, message = str(error.get("type")), f"{error.get('type')}: {error.get('reason')}"
        else:
            kind, message = "", str(error or body)[:300]
        message = f"{self.product} answers {status}: {message}"
        if status == 401:
            return AuthenticationFailed(message, hint="Check the account of the sink: user and password")
        if status == 403 and kind not in _PASSING:
            return PrivilegeMissing(
                message, position=index, hint="Grant what the guide of the sink lists on its indices"
            )
        if status in (429, 502, 503, 504):
            return ServerBusy(message, position=index)
        return self._refusal(kind, message, index)

    def _refusal(self, kind: str, message: str, index: str | None) -> PenstockError:
        if kind in _PASSING:
            return ServerBusy(f"{self.product} answers: {kind}: {message}", position=index)
        if kind in _OF_INDICES:
            return SchemaChanged(f"{self.product} answers: {kind}: {message}", position=index, hint=HINT_GONE)
        if kind in _OF_VALUES:
            return ValueMalformed(
                f"{self.product} cannot index a document: {message}",
                position=index,
                hint="Map the field otherwise in the index, or set errors: {table: skip_table}",
            )
        return ServerUnsupported(f"{self.product} answers: {kind}: {message}", position=index)


def _transport(
    product: str, extra: str, settings: Endpoint, authorization: Mapping[str, str]
) -> "elastic_transport.Transport":
    try:
        import elastic_transport
        from elastic_transport.client_utils import url_to_node_config
    except ImportError as problem:
        raise extra_missing("elastic-transport", extra) from problem

    class Exact(elastic_transport.JsonSerializer):
        """A serializer that keeps all digits when it parses numbers."""

        def json_loads(self, data: bytes | str) -> Any:
            return json.loads(data, parse_float=Number)

    try:
        nodes = [
            replace(
                url_to_node_config(url),
                headers=authorization,
                request_timeout=_ANSWER_SECONDS_MAX,
                ca_certs=None if settings.ca is None else str(settings.ca),
            )
            for url in settings.url.split(",")
        ]
        return elastic_transport.Transport(nodes, serializers={_JSON: Exact()})
    except ValueError as problem:
        raise OptionInvalid(
            f"{settings.url!r} is no {product} server: {problem}", hint="Write http://host:9200"
        ) from problem


def _authorization(settings: Endpoint, password: Secret | None, api_key: Secret | None) -> dict[str, str]:
    if api_key is not None:
        return {"authorization": f"ApiKey {api_key.reveal()}"}
    if settings.user is None:
        return {}
    account = f"{settings.user}:{password.reveal() if password else ''}"
    return {"authorization": f"Basic {base64.b64encode(account.encode()).decode()}"}
