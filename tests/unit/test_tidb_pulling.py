# SPDX-License-Identifier: Apache-2.0
"""A Pump's reader handles refusals, defects and late transactions."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from penstock.errors import (
    AccessDenied,
    ConnectionLost,
    LogDamaged,
    LogFull,
    PenstockError,
    PositionPurged,
    ServerChanged,
    TransactionLate,
)
from penstock.tidb import pulling
from penstock.tidb.merge import PulledTransaction
from penstock.tidb.pulling import MergeQueue, PumpReader


class _Refusal(grpc.RpcError):
    """Ends a call with a status code."""

    def __init__(self, status: grpc.StatusCode) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return "as the Pump says"


class _Stream:
    """The responses of a call that ends with an error at once."""

    def __init__(self, problem: Exception) -> None:
        self._problem = problem

    def __iter__(self) -> Iterator[bytes]:
        raise self._problem

    def cancel(self) -> None:
        pass


class _Channel:
    """A connection whose only call ends with an error."""

    def __init__(self, problem: Exception) -> None:
        self._problem = problem

    def unary_stream(self, method: str) -> Any:
        return lambda request, **options: _Stream(self._problem)

    def close(self) -> None:
        pass


def _reader(monkeypatch: pytest.MonkeyPatch, queue: MergeQueue, problem: Exception) -> PumpReader:
    monkeypatch.setattr(pulling, "open_channel", lambda address, tls: _Channel(problem))
    queue.join("first")
    return PumpReader("first", "first:8250", queue, 7001, None, compress=False, heard=lambda: None)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.OUT_OF_RANGE, PositionPurged),
        (grpc.StatusCode.DATA_LOSS, LogDamaged),
        (grpc.StatusCode.FAILED_PRECONDITION, ServerChanged),
        (grpc.StatusCode.PERMISSION_DENIED, AccessDenied),
    ],
)
def test_refusal_for_good_ends_the_merge_with_its_error(
    monkeypatch: pytest.MonkeyPatch, status: grpc.StatusCode, kind: type[PenstockError]
) -> None:
    queue = MergeQueue(5, 1 << 20)
    reader = _reader(monkeypatch, queue, _Refusal(status))
    reader.start()
    with pytest.raises(kind, match=r"first:8250.*as the Pump says"):
        queue.take(1, 30.0)
    reader.join()
    assert "as the Pump says" in str(reader.problem)


def test_unavailable_pump_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = MergeQueue(5, 1 << 20)
    reader = _reader(monkeypatch, queue, _Refusal(grpc.StatusCode.UNAVAILABLE))
    failures: list[Exception] = []

    def stop_at_second(self: Any, problem: Exception, **_: Any) -> None:
        failures.append(problem)
        if len(failures) == 2:
            reader.stop()

    monkeypatch.setattr(pulling.Retry, "wait", stop_at_second)
    reader.start()
    reader.join()
    assert [type(problem) for problem in failures] == [ConnectionLost, ConnectionLost]
    assert queue.take(1, 0.0) == ([], 5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_defect_of_a_reader_ends_the_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = MergeQueue(5, 1 << 20)
    reader = _reader(monkeypatch, queue, KeyError("a defect"))
    reader.start()
    with pytest.raises(KeyError, match="a defect"):
        queue.take(1, 30.0)
    reader.join()
    assert "a defect" in str(reader.problem)


def test_late_transaction_is_recorded_before_it_is_raised() -> None:
    recorded: list[TransactionLate] = []
    queue = MergeQueue(5, 1 << 20, recorded.append)
    queue.join("first")
    with pytest.raises(TransactionLate) as problem:
        queue.offer("first", PulledTransaction(4, 3, b"rows"))
    assert recorded == [problem.value]


def test_late_transaction_that_cannot_be_recorded_is_kept_for_another_try() -> None:
    def fail(late: TransactionLate) -> None:
        raise LogFull("no room")

    queue = MergeQueue(5, 1 << 20, fail)
    queue.join("first")
    with pytest.raises(LogFull):
        queue.offer("first", PulledTransaction(4, 3, b"rows"))
    assert isinstance(queue.late, TransactionLate)
