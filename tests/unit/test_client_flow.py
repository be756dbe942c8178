# SPDX-License-Identifier: Apache-2.0
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.client.flow import (
    RETRIES_DEFAULT,
    DaemonBackoff,
    FailurePolicy,
    Fit,
    Place,
    ShardFlow,
    Step,
    Survey,
    choose,
    fit,
)
from penstock.commit_versions import epoch_base
from penstock.errors import (
    ConnectionLost,
    OptionInvalid,
    PositionInvalid,
    PositionPurged,
    ServerBehind,
    ServerChanged,
)
from penstock.model import Position
from penstock.retry import RECONNECT


def place_at(offset: int, epoch: int = 0, key: str = "x", gtid_set: str = "") -> Place:
    return Place(Position(epoch, "mysql-bin.000001", offset), gtid_set, key)


def survey(
    load: int = 0, earliest: int = 4, head: int = 1000, epochs: Any = ((0, "x"),), epoch: int = 0
) -> Survey:
    file = "mysql-bin.000001"
    return Survey(load, epochs, Position(epoch, file, earliest), Position(epoch, file, head))


# --- One shard ------------------------------------------------------------------------------


def test_checkpoint_moves_only_over_contiguous_acks() -> None:
    flow: ShardFlow[str] = ShardFlow(place_at(4))
    for number, end in enumerate((10, 20, 30)):
        flow.add(str(number), 1)
        flow.advance(place_at(end))
    first, second, third = flow.take(), flow.take(), flow.take()
    assert first is not None
    assert second is not None
    assert third is not None
    assert flow.take() is None
    assert not flow.ack(third.number, third.round)
    assert not flow.ack(second.number, second.round)
    assert flow.done == place_at(4)
    assert flow.ack(first.number, first.round)
    assert (flow.done, flow.held_bytes) == (place_at(30), 0)


def test_batch_inside_a_transaction_does_not_move_the_checkpoint() -> None:
    flow: ShardFlow[str] = ShardFlow(place_at(4))
    flow.add("a", 1)
    flow.add("b", 1)
    flow.advance(place_at(50))
    first = flow.take()
    assert first is not None
    assert first.place == place_at(4)
    flow.ack(first.number, 0)
    assert flow.done == place_at(4)


def test_range_without_rows_moves_the_checkpoint_once_all_earlier_batches_are_acked() -> None:
    flow: ShardFlow[str] = ShardFlow(place_at(4))
    assert flow.advance(place_at(10))
    assert flow.done == place_at(10)
    flow.add("a", 1)
    assert not flow.advance(place_at(20))
    assert not flow.advance(place_at(30))
    delivery = flow.take()
    assert delivery is not None
    assert flow.ack(delivery.number, delivery.round)
    assert flow.done == place_at(30)


def test_duplicate_ack_changes_nothing() -> None:
    flow: ShardFlow[str] = ShardFlow(place_at(4))
    flow.add("a", 1)
    flow.advance(place_at(10))
    delivery = flow.take()
    assert delivery is not None
    assert flow.ack(delivery.number, 0)
    assert not flow.ack(delivery.number, 0)


def test_ack_of_a_rolled_back_batch_is_refused() -> None:
    flow: ShardFlow[str] = ShardFlow(place_at(4))
    flow.add("a", 1)
    flow.advance(place_at(10))
    before = flow.take()
    assert before is not None
    round_ = before.round
    assert flow.rollback() == 1
    with pytest.raises(OptionInvalid):
        flow.ack(before.number, round_)
    again = flow.take()
    assert again is not None
    assert again.content == "a"
    assert flow.ack(again.number, again.round)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_any_mix_of_acks_and_rollbacks_redelivers_exactly_the_unacked_tail(seed: int, steps: int) -> None:
    dice = random.Random(seed)
    flow: ShardFlow[int] = ShardFlow(place_at(0))
    added, end = 0, 0
    # `consumed` is the end of the consumed prefix. `out` are deliveries that are not acked.
    consumed = 0
    out: list[tuple[int, int, int]] = []
    acked: set[int] = set()
    expected = 0
    ends: dict[int, int] = {}
    for _ in range(steps):
        match dice.choice(("add", "empty", "take", "take", "ack", "ack", "rollback")):
            case "add":
                for _ in range(dice.randint(1, 3)):
                    flow.add(added, 1)
                    added += 1
                end += 10
                flow.advance(place_at(end))
                ends[added] = end
            case "empty":
                end += 10
                flow.advance(place_at(end))
                ends[added] = end
            case "take":
                delivery = flow.take()
                assert (delivery is None) == (expected == added)
                if delivery is not None:
                    assert delivery.content == expected, "in order, without a gap"
                    expected += 1
                    out.append((delivery.content, delivery.number, delivery.round))
            case "ack" if out:
                content, number, round_ = out.pop(dice.randrange(len(out)))
                flow.ack(number, round_)
                acked.add(content)
                while consumed in acked:
                    consumed += 1
            case "rollback":
                assert flow.rollback() == expected - consumed
                expected = consumed
                acked = {batch for batch in acked if batch < consumed}
                out = []
        # `done` is exactly at the end of the last range that is consumed completely.
        assert flow.done.position.offset == max(
            (at for count, at in ends.items() if count <= consumed), default=0
        )
        assert flow.held_bytes == added - consumed


# --- Failures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (FailurePolicy(), [Step.RETRY] * RETRIES_DEFAULT + [Step.STOP]),
        (FailurePolicy("retry", 2), [Step.RETRY, Step.RETRY, Step.STOP]),
        (FailurePolicy("skip"), [Step.SKIP]),
        (FailurePolicy("skip", 1), [Step.RETRY, Step.SKIP]),
        (FailurePolicy("stop"), [Step.STOP]),
    ],
)
def test_failures_follow_the_error_policy(policy: FailurePolicy, steps: list[Step]) -> None:
    assert [policy.after(tries)[0] for tries in range(1, len(steps) + 1)] == steps


def test_backoff_doubles_up_to_its_maximum() -> None:
    pauses = [FailurePolicy("retry", 9).after(tries)[1] for tries in range(1, 10)]
    assert pauses[:3] == [0.1, 0.2, 0.4]
    assert pauses[-1] == RECONNECT.longest


@pytest.mark.parametrize("wrong", [{"on_failure": "ignore"}, {"retries": -1}])
def test_invalid_policy_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionInvalid):
        FailurePolicy(**wrong)


# --- Daemons --------------------------------------------------------------------------------


def test_position_is_translated_to_the_daemons_epoch_number() -> None:
    assert fit(survey(epochs=((3, "x"),), epoch=3), place_at(500)) == Fit(-epoch_base(3))
    assert fit(survey(epochs=((0, "w"), (1, "x")), epoch=1), place_at(500, epoch=4)) == Fit(epoch_base(3))


def test_position_of_another_server_is_located_by_gtid_set_with_rising_commit_versions() -> None:
    translated = fit(survey(epochs=((2, "y"), (3, "z")), epoch=3), place_at(500, epoch=7, gtid_set="0-1-9"))
    assert translated == Fit(epoch_base(6), by_gtid_set=True)
    assert epoch_base(2) + translated.shift > epoch_base(7)


@pytest.mark.parametrize(
    ("asked", "at", "problem"),
    [
        (survey(head=400), place_at(500), ServerBehind),
        (replace(survey(head=400), is_server=True), place_at(500), PositionInvalid),
        (survey(earliest=600), place_at(500), PositionPurged),
        (survey(epochs=((0, "y"),)), place_at(500), ServerChanged),
        (Survey(problem=ConnectionLost("away")), place_at(500), ConnectionLost),
        (Survey(), place_at(500), ServerBehind),
    ],
)
def test_daemon_without_the_position_gives_the_reason(
    asked: Survey, at: Place, problem: type[Exception]
) -> None:
    with pytest.raises(problem):
        fit(asked, at)


def test_least_loaded_daemon_with_every_position_is_chosen() -> None:
    asked = {0: survey(load=5), 1: survey(load=1, head=400), 2: survey(load=3)}
    assert choose(asked, {0: place_at(300), 1: place_at(500)}, None).daemon == 2
    assert choose(asked, {0: place_at(300)}, None).daemon == 1


def test_subscriber_moves_only_to_a_daemon_that_would_stay_less_loaded() -> None:
    places = {0: place_at(500)}
    assert choose({0: survey(load=3), 1: survey(load=2)}, places, 0).daemon == 0
    assert choose({0: survey(load=4), 1: survey(load=2)}, places, 0).daemon == 1


def test_daemon_of_the_same_server_is_preferred_to_an_idle_daemon_of_another() -> None:
    at = {0: place_at(500, gtid_set="0-1-9")}
    chosen = choose({0: survey(load=9), 1: survey(epochs=((0, "y"),))}, at, None)
    assert (chosen.daemon, chosen.fits) == (0, {0: Fit(0)})


def test_equal_daemons_are_spread_by_preference() -> None:
    asked = {number: survey() for number in range(3)}
    assert {choose(asked, {}, None, preference).daemon for preference in range(3)} == {0, 1, 2}


def test_subscriber_keeps_waiting_while_an_unreachable_daemon_may_have_the_position() -> None:
    asked = {0: survey(earliest=600), 1: Survey(problem=ConnectionLost("away"))}
    with pytest.raises(ConnectionLost):
        choose(asked, {0: place_at(500)}, None)
    with pytest.raises(PositionPurged):
        choose({0: asked[0]}, {0: place_at(500)}, None)


def test_failed_daemon_is_retried_with_backoff_until_it_delivers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    backoff = DaemonBackoff()
    backoff.failed(0, 100.0)
    assert backoff.ready([0, 1], 100.0) == [1]
    assert backoff.pause([0], 100.0) == pytest.approx(0.1)
    assert backoff.pause([0, 1], 100.0) == 0
    backoff.failed(0, 101.0)
    assert backoff.pause([0], 101.0) == pytest.approx(0.2)
    backoff.progressed(0)
    assert backoff.ready([0, 1], 101.0) == [0, 1]
