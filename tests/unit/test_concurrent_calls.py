# SPDX-License-Identifier: Apache-2.0
import threading

import pytest

from penstock.sinks.concurrent_calls import call_for_each


@pytest.mark.parametrize("threads_max", [1, 3, 50])
def test_each_subject_gets_one_call(threads_max: int) -> None:
    called: list[int] = []
    call_for_each(called.append, range(40), threads_max)
    assert sorted(called) == list(range(40))


def test_calls_run_at_once() -> None:
    both = threading.Barrier(2, timeout=60)
    call_for_each(lambda _: both.wait(), range(2), 2)


def test_error_is_raised_after_the_running_calls() -> None:
    is_running, has_failed, ended = threading.Event(), threading.Event(), set[int]()

    def call(number: int) -> None:
        if number == 0:
            assert is_running.wait(60)
            has_failed.set()
            raise ValueError("the first")
        is_running.set()
        assert has_failed.wait(60)
        ended.add(number)

    with pytest.raises(ValueError, match="the first"):
        call_for_each(call, range(2), 2)
    assert ended == {1}


def test_no_call_begins_after_an_error() -> None:
    begun: list[int] = []

    def call(number: int) -> None:
        begun.append(number)
        raise ValueError(number)

    for threads_max in (1, 2):
        begun.clear()
        with pytest.raises(ValueError, match=r"0|1"):
            call_for_each(call, range(100), threads_max)
        assert len(begun) <= threads_max
