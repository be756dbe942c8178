# SPDX-License-Identifier: Apache-2.0
"""Charts of the last 24 hours: the values that the daemon keeps for them, and the drawings of the console."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.console.charts import draw_chart, round_up
from penstock.serve.samples import SERIES, Samples
from penstock.serve.served import Served
from penstock.telemetry.ring import KEPT_SECONDS, STEP_SECONDS, Ring
from tests.support.daemon.console import console_of
from tests.support.daemon.served_log import INSTANCE, ServedLog, captured_log, serving
from tests.support.suite.nonempty import each
from tests.support.suite.patience import wait_until

HOUR_US = 3_600_000_000
GUEST: dict[str, Any] = {"name": "guest", "token": "guest-token", "instances": ["other"]}


class Clock:
    """A clock that is set by hand, in seconds."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


# --- The ring ---------------------------------------------------------------------------------------


def test_ring_keeps_a_day_and_never_grows() -> None:
    clock = Clock()
    ring = Ring(["lag"], clock)
    size = ring.bytes
    for number in range(KEPT_SECONDS // STEP_SECONDS + 500):
        clock.now += STEP_SECONDS
        ring.add({"lag": float(number)})
    values = ring.read(KEPT_SECONDS, 100_000)["lag"]
    assert values == [float(number) for number in range(500, 500 + len(values))]
    assert ring.bytes == size
    assert Ring(SERIES).bytes < 2 << 20, "of one instance"


def test_missing_samples_are_gaps_and_the_peak_of_a_part_is_kept() -> None:
    clock = Clock()
    ring = Ring(["lag", "rows"], clock)
    ring.add({"lag": 1.0, "rows": None})
    clock.now += 3 * STEP_SECONDS
    ring.add({"lag": 9.0, "rows": 5.0})
    clock.now += STEP_SECONDS
    ring.add({"lag": 2.0, "rows": 4.0})
    assert ring.read(5 * STEP_SECONDS, 100) == {
        "lag": [1.0, None, None, 9.0, 2.0],
        "rows": [None, None, None, 5.0, 4.0],
    }
    assert ring.read(4 * STEP_SECONDS, 2)["lag"] == [None, 9.0]
    clock.now += 2 * KEPT_SECONDS
    assert set(ring.read(KEPT_SECONDS, 50)["lag"]) == {None}


@pytest.mark.parametrize("points", [1, 7, 48, 120, 1440])
@pytest.mark.parametrize("seconds", [1, 3600, 6 * 3600, KEPT_SECONDS])
def test_ring_returns_no_more_points_than_asked_for(seconds: int, points: int) -> None:
    clock = Clock()
    ring = Ring(["lag"], clock)
    ring.add({"lag": 3.0})
    values = ring.read(seconds, points)["lag"]
    assert 1 <= len(values) <= points
    assert values[-1] == 3.0


# --- The daemon -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon() -> Iterator[ServedLog]:
    with captured_log() as log, serving(log, {"token": "a-token"}, [GUEST]) as daemon:
        path = f"/v1/instances/{INSTANCE}/charts"
        wait_until(lambda: daemon.ask("GET", path).json["series"]["lag_seconds"] != [])
        yield daemon


def test_daemon_samples_each_instance_that_it_captures() -> None:
    class Instance:
        name = INSTANCE

        def status(self) -> dict[str, Any]:
            return {"lag_seconds": 4.0, "rows_per_second": None}

        def log(self) -> Any:
            raise AssertionError("a sample needs no log")

    served = Served(
        {INSTANCE: Instance(), "elsewhere": Instance()},
        None,  # type: ignore[arg-type]
        is_here=lambda name: name == INSTANCE,
    )
    samples = Samples(served)
    samples.take()
    assert samples.read(INSTANCE, 60, 6)["lag_seconds"][-1] == 4.0
    assert samples.read(INSTANCE, 60, 6)["rows_per_second"][-1] is None
    assert samples.read("elsewhere", 60, 6)["lag_seconds"] == []


def test_charts_are_those_of_the_instances_of_the_account(daemon: ServedLog) -> None:
    whole = daemon.ask("GET", "/v1/charts?span=600&points=10").json
    assert len(whole["instances"][INSTANCE]["lag_seconds"]) == 10
    assert daemon.ask("GET", "/v1/charts", token="guest-token").json["instances"] == {}
    path = f"/v1/instances/{INSTANCE}/charts"
    assert daemon.ask("GET", path, token="guest-token").status == 403
    assert daemon.ask("GET", "/v1/instances/nothing/charts").status == 404
    assert daemon.ask("GET", f"{path}?points=x").status == 400
    assert len(daemon.ask("GET", f"{path}?points=99999&span=999999").json["series"]["log_bytes"]) <= 1440


def test_pages_show_charts_without_a_script(daemon: ServedLog) -> None:
    with console_of(daemon) as browser:
        browser.post("/login", {"token": "a-token"})
        url = f"http://127.0.0.1:{daemon.port()}"
        page = browser.get("/instance", daemon=url, instance=INSTANCE)
        day = browser.get("/instance", daemon=url, instance=INSTANCE, hours="24")
        overview = browser.get("/")
        odd = browser.get("/instance", daemon=url, instance=INSTANCE, hours="<b>")
    assert page.text.count('<figure class="chart">') == 4
    assert page.text.count("<polyline") >= 1
    assert "UTC: 0.0 s</title>" in page.text, "the exact value of a point"
    assert "hours=24" in day.text
    assert 'class="spark"' in overview.text
    assert (odd.status, "<b>" in odd.text) == (200, False)


# --- The picture ------------------------------------------------------------------------------------


def test_chart_breaks_its_line_where_values_are_missing() -> None:
    chart = draw_chart([1.0, 2.0, None, 3.0, None], 3600, HOUR_US)
    assert [len(line.split()) for line in chart.lines] == [3, 2]
    assert (chart.top, chart.newest) == (5.0, None)
    assert [point.value for point in chart.points] == [1.0, 2.0, 3.0]
    assert [point.time_us // 60_000_000 for point in chart.points] == [6, 18, 42]
    heights = [float(line.split()[0].partition(",")[2]) for line in chart.lines]
    assert heights[1] < heights[0], "a higher value is higher in the picture"


@pytest.mark.parametrize("values", [[], [None]])
def test_chart_without_values_has_no_line(values: list[float | None]) -> None:
    chart = draw_chart(values, 3600, HOUR_US)
    assert (chart.lines, chart.points, chart.newest) == ([], [], None)


@pytest.mark.parametrize("values", [[0.0], [1e12, 0.0], [math.ulp(0.0)]])
def test_chart_stays_inside_its_picture(values: list[float | None]) -> None:
    for is_small in (False, True):
        chart = draw_chart(values, 3600, HOUR_US, is_small=is_small)
        for line in each(chart.lines):
            for corner in line.split():
                x, _, y = corner.partition(",")
                assert 0 <= float(x) <= (96 if is_small else 460)
                assert 0 <= float(y) <= (20 if is_small else 110)


def test_scale_ends_at_a_round_number() -> None:
    rounded = {0.0: 1.0, 0.3: 0.5, 1.0: 1.0, 1.1: 2.0, 4.0: 5.0, 77.0: 100.0, 1000.0: 1000.0}
    assert {value: round_up(value) for value in rounded} == rounded
    sizes = {512.0: 1000.0, 1024.0: 1024.0, 3 * 2**20: 5 * 2**20, 700 * 2**30: 1000 * 2**30}
    assert {value: round_up(value, is_bytes=True) for value in sizes} == sizes
