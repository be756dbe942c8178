# SPDX-License-Identifier: Apache-2.0
"""Kafka's client library, and the translation of its errors to Penstock errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.errors import (
    AccessDenied,
    AuthenticationFailed,
    ConnectionLost,
    DependencyMissing,
    LeaseLost,
    OptionInvalid,
    PenstockError,
    ServerBusy,
    TlsFailed,
)


def library() -> Any:
    """Return the library. Raises DependencyMissing."""
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as missing:
        raise DependencyMissing(
            "confluent-kafka is not installed", hint="Run: pip install 'penstock[kafka]'"
        ) from missing
    return confluent_kafka


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Translate the library's exceptions into Penstock errors. `what` describes the operation."""
    kafka = library()
    try:
        yield
    except kafka.KafkaException as problem:
        raise error_of(problem.args[0], what) from None
    except kafka.KafkaError as problem:
        raise error_of(problem, what) from None


# The library's error codes, the Penstock error for each, and its hint.
_BY_CODE: tuple[tuple[tuple[str, ...], type[PenstockError], str], ...] = (
    (
        ("_FENCED", "INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED"),
        LeaseLost,
        "Another process writes this part of the pipeline now",
    ),
    (
        ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED"),
        AuthenticationFailed,
        "Check user, password and mechanism of the Kafka account",
    ),
    (("_SSL",), TlsFailed, "Check tls and ca of the Kafka account"),
    (
        (
            "TOPIC_AUTHORIZATION_FAILED",
            "CLUSTER_AUTHORIZATION_FAILED",
            "GROUP_AUTHORIZATION_FAILED",
            "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
        ),
        AccessDenied,
        "Run kafka-acls --add: a sink needs Write and Describe, on topics and transactional ids penstock/*;"
        " a source needs Read and Describe on its topics",
    ),
    (
        ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"),
        OptionInvalid,
        "Raise max.message.bytes of the topic, and message.max.bytes under options of the kafka sink",
    ),
    (
        (
            "TOPIC_EXCEPTION",
            "_INVALID_ARG",
            "INVALID_CONFIG",
            "INVALID_TRANSACTION_TIMEOUT",
            "POLICY_VIOLATION",
        ),
        OptionInvalid,
        "Check the settings of Kafka",
    ),
    (
        # The topic is growing or was recreated, and brokers learn of the change one after another.
        ("_UNKNOWN_PARTITION",),
        ServerBusy,
        "The partitions of the topic are changing: the next try takes their new number",
    ),
    (
        # Brokers that are starting or considered dead do not count as replicas.
        ("INVALID_REPLICATION_FACTOR",),
        ServerBusy,
        "Check that all brokers take part, and that replicas of the kafka sink is not more than there are",
    ),
    (
        ("_ALL_BROKERS_DOWN", "_TRANSPORT", "_RESOLVE", "_TIMED_OUT", "_MSG_TIMED_OUT"),
        ConnectionLost,
        "Check that the brokers run, and their addresses",
    ),
)


def error_of(problem: Any, what: str) -> PenstockError:
    """Return the Penstock error for an error from the library."""
    codes = library().KafkaError
    message = f"Kafka: {what}: {problem.str()}"
    for names, error, hint in _BY_CODE:
        if problem.code() in [getattr(codes, name) for name in names]:
            return error(message, hint=hint)
    return ServerBusy(message, hint="Look at the brokers' log if it stays")
