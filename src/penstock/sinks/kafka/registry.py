# SPDX-License-Identifier: Apache-2.0
"""A schema registry with Confluent's REST protocol: settings, and the ids of schemas.

Confluent's registry, Karapace and Redpanda support it, and so does Apicurio Registry under
`/apis/ccompat/v7`.

Source: Confluent's "Schema Registry API Reference".
"""

import json
from typing import Any, Literal
from urllib.parse import quote

import urllib3
from pydantic import Field, field_validator
from urllib3.exceptions import HTTPError
from urllib3.util import Timeout, make_headers

from penstock.errors import (
    AccessDenied,
    AuthenticationFailed,
    OptionInvalid,
    PenstockError,
    SchemaInvalid,
    ServerBusy,
)
from penstock.model import Secret
from penstock.settings.values import Seconds
from penstock.sinks.endpoint import Endpoint, connection_error
from penstock.sinks.kafka.protobuf_schemas import Nullables

# The kinds of schemas, by the names of the protocol.
SchemaKind = Literal["AVRO", "PROTOBUF"]

_CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"
_SHOWN_LETTERS_MAX = 500
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _CONFLICT, _UNPROCESSABLE = 401, 403, 404, 409, 422
_TIMEOUT, _TOO_MANY = 408, 429


class Registry(Endpoint):
    """The schema registry."""

    subjects: Literal["topic", "record", "topic_record"] = Field(
        default="topic",
        description="the subjects, by Confluent's strategies: topic: the topic with -key or -value;"
        " record: the record's name; topic_record: both",
    )
    auto_register: bool = Field(
        default=True, description="whether new schemas are registered; false: they must be there already"
    )
    nullables: Nullables = Field(
        default="optional",
        description="fields of protobuf that may be null: optional; plain: a null is read as 0 or an empty"
        " text, as with Confluent's converter without optional.for.nullables",
    )
    timeout: Seconds = Field(default=30.0, gt=0, description="timeout for one response")

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("write http://host:8081 or https://host:8081")
        return url.rstrip("/")

    def subject(self, topic: str | None, record: str, part: Literal["key", "value"]) -> str:
        """Return the subject of a record's schema. `topic` is None if the topic depends on the row.

        Raises OptionInvalid if the subject contains the topic and the topic depends on the row.
        """
        if self.subjects == "record":
            return record
        if topic is None:
            raise OptionInvalid(
                "the subjects of schemas contain the topic, which depends on rows",
                hint="Set registry.subjects of the kafka sink to record, and the same strategy for consumers",
            )
        return f"{topic}-{part}" if self.subjects == "topic" else f"{topic}-{record}"


class RegistryClient:
    """Asks a registry for the ids of schemas. Can be used by several threads."""

    def __init__(self, settings: Registry, password: Secret | None) -> None:
        self._settings = settings
        self._headers = {"Content-Type": _CONTENT_TYPE, "Accept": f"{_CONTENT_TYPE}, application/json"}
        if settings.user is not None:
            account = f"{settings.user}:{password.reveal() if password else ''}"
            self._headers["Authorization"] = make_headers(basic_auth=account)["authorization"]
        self._pool = urllib3.PoolManager(
            timeout=Timeout(settings.timeout),
            ca_certs=None if settings.ca is None else str(settings.ca),
            cert_reqs="CERT_REQUIRED",
        )

    def check(self, kind: SchemaKind) -> None:
        """Raise Penstock errors if the registry does not answer, or does not support a kind of schema."""
        types = self._request("GET", "/schemas/types")
        if kind not in types:
            raise OptionInvalid(
                f"the schema registry {self._settings.url} has no {kind} schemas, only {types}",
                hint="Check registry.url of the kafka sink",
            )

    def schema_id(self, subject: str, schema: str, kind: SchemaKind = "AVRO") -> int:
        """Return the id that a schema has under a subject. The schema is passed as text and is registered if
        that is allowed.

        The request may be repeated: a schema that is registered already keeps its id. Raises SchemaInvalid if
        the registry refuses the schema or does not have it, or an error if the request fails.
        """
        path = f"/subjects/{quote(subject, safe='')}"
        if self._settings.auto_register:
            path += "/versions"
        # Registries treat a schema without a type as Avro.
        body = {"schema": schema} | ({} if kind == "AVRO" else {"schemaType": kind})
        answer = self._request("POST", path, body)
        match answer:
            case {"id": int(schema_id)} if 0 <= schema_id < 1 << 32:
                return schema_id
        raise _not_a_registry(self._settings.url, answer)

    def _request(self, method: str, path: str, body: Any = None) -> Any:
        url = f"{self._settings.url}{path}"
        encoded = None if body is None else json.dumps(body).encode()
        try:
            answer = self._pool.request(
                method, url, body=encoded, headers=self._headers, redirect=False, retries=False
            )
        except (HTTPError, OSError) as problem:
            raise connection_error(f"the schema registry {self._settings.url}", problem) from problem
        if answer.status != 200:
            raise _refusal(url, answer)
        try:
            return json.loads(answer.data)
        except ValueError as problem:
            shown = answer.data[:_SHOWN_LETTERS_MAX].decode("utf-8", "replace")
            raise _not_a_registry(url, shown) from problem


def _not_a_registry(url: str, answer: Any) -> OptionInvalid:
    return OptionInvalid(
        f"{url} answers {str(answer)[:_SHOWN_LETTERS_MAX]!r}, as no schema registry does",
        hint="Check registry.url of the kafka sink: Apicurio's ends in /apis/ccompat/v7",
    )


def _refusal(url: str, answer: urllib3.BaseHTTPResponse) -> PenstockError:
    reason = answer.data[:_SHOWN_LETTERS_MAX].decode("utf-8", "replace").strip()
    message = f"{url} answers {answer.status}: {reason}"
    match answer.status:
        case status if status >= 500 or status in (_TIMEOUT, _TOO_MANY):
            return ServerBusy(message, hint="Look at the schema registry; the batch is retried")
        case 401:
            return AuthenticationFailed(message, hint="Set registry.user and registry.password")
        case 403:
            return AccessDenied(message, hint="Allow the account to read and to write the subject")
        case 409:
            return SchemaInvalid(
                f"the new schema is not compatible with the subject's earlier ones: {message}",
                hint="Set the compatibility of the subject to NONE once consumers can read both, then start"
                ' again: PUT /config/SUBJECT with {"compatibility": "NONE"}',
            )
        case 422:
            return SchemaInvalid(message, hint="Look at the schema registry's log")
        case 404:
            return SchemaInvalid(
                f"the schema is not registered: {message}",
                hint="Register it, or set registry.auto_register to true; and check registry.url",
            )
    return OptionInvalid(message, hint="Check registry.url of the kafka sink")
