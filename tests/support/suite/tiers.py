# SPDX-License-Identifier: Apache-2.0
"""Selects the tests of a run, and reports how long each part of the run took.

Every test belongs to one tier:

- everyday: the default; `make test` runs it, and a change is merged only if it passes;
- deep: marked `deep(guard="tests/...::test_...")`; `make test-all` adds it. The guard is the everyday test of
  the same capability. `deep(keep=("word",))` keeps the cases whose id contains the word in the everyday tier,
  where they guard the others;
- long: marked `long`; only `make test-long` runs it, so it guards no other test.

The brokers of Kafka, RabbitMQ and RocketMQ, and the nodes of Elasticsearch and OpenSearch, start too slowly
for the everyday tier, so no everyday test uses a real one. Instead, tests/unit/test_sink_messages.py covers
the messages, tests/integration/test_sink_http.py the order, bounds and refusals of a sink that sends
requests, and tests/conformance the contract of every sink, on embedded stores and SQL servers.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tools.servers.starting import LATE_STARTS_VARIABLE
from tools.suite.run import STEPS_VARIABLE, area_words, has_tests, in_area

TESTS = Path(__file__).resolve().parents[2]
DURATIONS = TESTS.parent / "build" / "durations.json"
TIERS = ("everyday", "deep", "long")
SELECTIONS = {"everyday": ("everyday",), "deep": ("deep",), "all": ("everyday", "deep")}
# A run sets this variable for its own workers.
TIERS_VARIABLE = "PENSTOCK_TIERS"
# For each pair: cases with the first parameter are deep if the same test has a case with the second, which
# guards them.
GUARDED_PARAMETERS = {"mariadb11": "mariadb", "zookeeper": "sqlite"}


def tier_of(item: pytest.Item) -> str:
    """Return a test's tier."""
    if item.get_closest_marker("long") is not None:
        return "long"
    is_deep = any(not is_kept(item, marker) for marker in item.iter_markers("deep"))
    return "deep" if is_deep else "everyday"


def is_kept(item: pytest.Item, marker: pytest.Mark) -> bool:
    """Return whether a deep marker leaves this case in the everyday tier, because its id contains a word of
    `keep`.
    """
    case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
    return any(word in case for word in marker.kwargs.get("keep", ()))


def check_kept_cases(items: Iterable[pytest.Item]) -> None:
    """Raise UsageError if a test keeps cases for the everyday tier that do not exist."""
    kept: dict[str, bool] = defaultdict(bool)
    for item in items:
        for marker in item.iter_markers("deep"):
            if marker.kwargs.get("keep"):
                kept[item.nodeid.partition("[")[0]] |= is_kept(item, marker)
    if empty := sorted(test for test, has_case in kept.items() if not has_case):
        raise pytest.UsageError(f"deep(keep=...) keeps no case of {', '.join(empty)}")


def mark_guarded_parameters(items: list[pytest.Item]) -> None:
    """Mark the cases of a test that are guarded by another case of the same test.

    `deep_flavors("mariadb")` on a module or test does the same for its MariaDB cases, which MySQL's cases
    guard.
    """
    names = {item.nodeid for item in items}
    for item in items:
        guarded = dict(GUARDED_PARAMETERS)
        for marker in item.iter_markers("deep_flavors"):
            guarded |= dict.fromkeys(("mariadb11", *marker.args), "mysql")
        for parameter, guard in guarded.items():
            case = item.nodeid.replace(parameter, guard)
            if case != item.nodeid and case in names:
                item.add_marker(pytest.mark.deep(guard=case))


def selected_tiers(config: pytest.Config) -> tuple[str, ...]:
    """Return the tiers to run: the tiers in --tier, or all tiers if tests are named, or otherwise the
    everyday tier.

    `PENSTOCK_LONG=1` adds the long tier.
    """
    if hasattr(config, "workerinput"):
        # A worker does not receive the names of the selected tests.
        return tuple(os.environ[TIERS_VARIABLE].split(","))
    selection = config.getoption("--tier")
    if selection is None:
        named = config.args_source is pytest.Config.ArgsSource.ARGS
        selection = "all" if named else "everyday"
    tiers = SELECTIONS[selection]
    return (*tiers, "long") if os.environ.get("PENSTOCK_LONG") else tiers


def note_selection(config: pytest.Config) -> None:
    """Pass the selected tiers to the workers of this run."""
    os.environ[TIERS_VARIABLE] = ",".join(selected_tiers(config))


def area_filter(config: pytest.Config) -> list[str] | None:
    """Return the words of --area, or None if all tests are selected."""
    text = config.getoption("--area")
    return area_words(text) if text else None


def check_area(config: pytest.Config) -> None:
    """Raise UsageError if no test file has a word of the area in its path.

    The check runs before workers start, because pytest would print an error in a worker as an internal error.
    """
    areas = area_filter(config)
    if areas is not None and not has_tests(areas):
        raise pytest.UsageError(
            f"--area: no test file has {' or '.join(areas) or 'a word'} in its path: see tests/"
        )


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other tiers and areas."""
    if not any("::" in argument for argument in config.args):
        check_kept_cases(items)
    mark_guarded_parameters(items)
    tiers, areas = selected_tiers(config), area_filter(config)
    chosen = [
        item
        for item in items
        if tier_of(item) in tiers and (areas is None or in_area(item.nodeid.partition("::")[0], areas))
    ]
    chosen_names = {id(item) for item in chosen}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen_names])
    items[:] = chosen


def note_late_starts(folder: Path) -> None:
    """Make every process of this run record its late starts in the same new file, in this folder."""
    if LATE_STARTS_VARIABLE not in os.environ:
        path = folder / f"late-starts-{os.getpid()}"
        # An earlier run may have had the same process id.
        path.unlink(missing_ok=True)
        os.environ[LATE_STARTS_VARIABLE] = str(path)


def late_starts() -> list[str]:
    """Return a line for each process that answered only after its second start."""
    path = Path(os.environ[LATE_STARTS_VARIABLE])
    return path.read_text().splitlines() if path.exists() else []


def write_durations(reports: Iterable[pytest.TestReport], path: Path) -> None:
    """Write the seconds of every test to a JSON file, the slowest first, setup and teardown included."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        seconds[report.nodeid] += report.duration
    ordered = sorted(seconds.items(), key=lambda pair: -pair[1])
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({test: round(duration, 3) for test, duration in ordered}, indent=0))


def step_times() -> Iterator[str]:
    """Yield a line for each previous step, as measured by `tools.suite.run`."""
    for step, seconds in json.loads(os.environ.get(STEPS_VARIABLE, "{}")).items():
        yield f"{step:<36} {seconds:>8.1f} s"


def times(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """Yield a line for each tier and each test folder: the number of tests and their total duration."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for report in reports:
        tier = next((value for name, value in report.user_properties if name == "tier"), "everyday")
        folder = "/".join(report.nodeid.split("/")[:2])
        for part in (f"{tier} tier", folder):
            seconds[part] += report.duration
            tests[part].add(report.nodeid)
    for part in sorted(seconds, key=lambda part: (not part.endswith(" tier"), -seconds[part])):
        yield f"{part:<24}{len(tests[part]):>6} tests {seconds[part]:>8.1f} s"
