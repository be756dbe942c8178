# SPDX-License-Identifier: Apache-2.0
"""All error numbers of a server are in one table; a target lists only the errors that it classifies
differently.
"""

import ssl
from collections.abc import Callable

import pymysql
import pytest

from penstock.errors import (
    AnswerTimedOut,
    AuthenticationFailed,
    ConnectionLost,
    PenstockError,
    PositionPurged,
    PrivilegeMissing,
    SchemaChanged,
    ServerBusy,
    ServerUnsupported,
    TlsFailed,
    ValueMalformed,
)
from penstock.model import Secret, ServerAddress
from penstock.mysql.connection import connect as connect_to_source
from penstock.sinks.mysql.connection import connect as connect_to_target

ADDRESS = ServerAddress("db1", user="repl", password=Secret("secret"))
Raised = Callable[[pymysql.err.Error], tuple[PenstockError, PenstockError]]


@pytest.fixture
def errors_of(monkeypatch: pytest.MonkeyPatch) -> Raised:
    """Return a function that returns the errors of a source and of a target whose server refuses a login."""

    def errors(problem: pymysql.err.Error) -> tuple[PenstockError, PenstockError]:
        def refuse(*_: object, **__: object) -> None:
            raise problem

        raised = []
        for module, connect in (
            ("penstock.mysql.connection", connect_to_source),
            ("penstock.sinks.mysql.connection", connect_to_target),
        ):
            monkeypatch.setattr(f"{module}.dial", refuse)
            with pytest.raises(PenstockError) as caught:
                connect(ADDRESS)
            raised.append(caught.value)
        return raised[0], raised[1]

    return errors


@pytest.mark.parametrize(
    ("number", "of_source", "of_target"),
    [
        (1040, ServerBusy, ServerBusy),
        (1213, ServerBusy, ServerBusy),
        (2013, ConnectionLost, ConnectionLost),
        (1160, ConnectionLost, ConnectionLost),
        (9002, ServerBusy, ServerBusy),
        (1045, AuthenticationFailed, AuthenticationFailed),
        (1820, AuthenticationFailed, AuthenticationFailed),
        (1142, PrivilegeMissing, PrivilegeMissing),
        (1146, ServerUnsupported, SchemaChanged),
        (1062, ServerUnsupported, ValueMalformed),
        # A target has no log that could be purged.
        (8055, PositionPurged, ServerBusy),
        (4711, ServerUnsupported, ServerUnsupported),
    ],
)
def test_number_means_the_same_for_source_and_target_unless_a_target_says_otherwise(
    number: int, of_source: type[PenstockError], of_target: type[PenstockError], errors_of: Raised
) -> None:
    source, target = errors_of(pymysql.err.OperationalError(number, "what the server says"))
    assert (type(source), type(target)) == (of_source, of_target)
    for error in (source, target):
        assert f"what the server says (server error {number})" in str(error)
        assert "secret" not in str(error)


def test_hint_names_the_file_that_has_the_account(errors_of: Raised) -> None:
    source, target = errors_of(pymysql.err.OperationalError(1045, "access denied"))
    assert "PENSTOCK_PASSWORD" in str(source.hint)
    assert "the sink in the pipeline's file" in str(target.hint)


def test_refused_certificate_and_silence_have_their_own_errors(errors_of: Raised) -> None:
    refused = pymysql.err.OperationalError(2003, "no connection")
    certificate = ssl.SSLCertVerificationError("self-signed")
    certificate.reason = "CERTIFICATE_VERIFY_FAILED"
    refused.original_exception = certificate  # type: ignore[attr-defined]
    assert {type(error) for error in errors_of(refused)} == {TlsFailed}
    silent = pymysql.err.OperationalError(2013, "lost connection")
    silent.original_exception = TimeoutError()  # type: ignore[attr-defined]
    assert {type(error) for error in errors_of(silent)} == {AnswerTimedOut}
