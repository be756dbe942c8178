# SPDX-License-Identifier: Apache-2.0
"""Real servers for every test, and one policy for missing parts.

A test is skipped only if the machine cannot provide a part that the test needs. The summary of the run lists
the missing parts and how to get them. Under `CI=true`, a missing part is a failure. `--server-flavors
mysql,mariadb` (or `PENSTOCK_FLAVORS`) excludes the other servers. `CI=true` refuses this option.
"""

import functools
import gc
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    # Tests import `tools` and `bench`, which are not part of the installed package.
    sys.path.insert(0, str(ROOT))

from tests.support.binlog.type_corpus import CorpusOf, TypeCorpus  # noqa: E402
from tests.support.spark.patience import write_configuration  # noqa: E402
from tests.support.suite import tiers  # noqa: E402
from tests.support.suite.fixture_types import (  # noqa: E402
    FreshDatabase,
    LendServer,
    MissingPart,
    StartServer,
)
from tests.support.suite.server_pool import PoolCounts, ServerPool, global_variables, summarize  # noqa: E402
from tools.servers import FLAVORS, PartMissing, Server  # noqa: E402
from tools.suite.run import STEPS_VARIABLE  # noqa: E402
from tools.zookeeper import ZooKeeper  # noqa: E402

_MISSING = pytest.StashKey[dict[str, str]]()
_POOLS = pytest.StashKey[list[PoolCounts]]()
_LEFT_OUT = "left out by --server-flavors"
_ON_ONE_WORKER = {
    "tidy": re.compile("tests/tidy/"),
    "type corpus": re.compile(r"tests/integration/test_(types|load_values|messages_json|messages_canal)\.py"),
    "Spark session": re.compile(
        r"tests/(fault/test_pipeline_kills|integration/test_(spark_(batch|log|stream|unnamed_columns)"
        r"|pipeline_(spark|steps)|forged_values))\.py"
    ),
}
_database_numbers = itertools.count(1)

# Do not fail an example because of its duration, since a machine may pause for seconds. Everyday runs use the
# same examples each time, and long runs generate new ones.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=not os.environ.get("PENSTOCK_LONG"),
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--server-flavors",
        default=os.environ.get("PENSTOCK_FLAVORS", ",".join(FLAVORS)),
        help=f"the database servers that tests may start, divided by commas (default: {','.join(FLAVORS)})",
    )
    parser.addoption(
        "--tier",
        choices=tuple(tiers.SELECTIONS),
        help="the tests to run (default: everyday, or all tests of the paths that are named)",
    )
    parser.addoption(
        "--area", help="run only test files with one of these words, divided by commas, in their path"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_MISSING] = {}
    config.stash[_POOLS] = []
    markers = {
        "slow": "takes more than ten seconds",
        "deep(guard, keep)": "a test for `make test-all`: tests/support/suite/tiers.py has the rules",
        "deep_flavors(flavor)": "cases on these flavors are deep; the MySQL cases guard them",
        "long": "a sweep for `make test-long`",
        "timing": "the result depends on time or on processes; `make test-stress` repeats it",
    }
    for marker, meaning in markers.items():
        config.addinivalue_line("markers", f"{marker}: {meaning}")
    tiers.check_area(config)
    tiers.note_selection(config)
    tiers.note_late_starts(Path(tempfile.gettempdir()))
    check_flavors(config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Keep the counts of a worker's server pool for the summary. A worker that crashed reports nothing."""
    if counts := getattr(node, "workeroutput", {}).get("server_pool"):
        node.config.stash[_POOLS].append(PoolCounts(**counts))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run files that share an expensive resource on one worker: the parsed project, the corpus of types,
    Spark.
    """
    from xdist.scheduler import LoadFileScheduling

    class SharedFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return next((name for name, files in _ON_ONE_WORKER.items() if files.match(scope)), scope)

    return SharedFiles(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the modules and items of the run from garbage collection, because they live until its end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of this run, and begin with the files that contain slow tests.

    If a worker began a slow file last, the end of the run would be delayed.
    """
    tiers.select(config, items)
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        item.user_properties.append(("tier", tiers.tier_of(item)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [
        report
        for outcome in ("passed", "failed", "error", "skipped", "")
        for report in terminalreporter.stats.get(outcome, [])
        if isinstance(report, pytest.TestReport)
    ]
    if reports:
        terminalreporter.section("time of each step, tier and folder")
        for line in tiers.step_times():
            terminalreporter.line(line)
        for line in tiers.times(reports):
            terminalreporter.line(line)
        for line in summarize(config.stash[_POOLS]):
            terminalreporter.line(line)
        if STEPS_VARIABLE in os.environ:
            tiers.write_durations(reports, tiers.DURATIONS)
    if late := tiers.late_starts():
        terminalreporter.section("flaky: started a second time", yellow=True, bold=True)
        for line in late:
            terminalreporter.line(line)
    skipped = terminalreporter.stats.get("skipped", [])
    missing = config.stash[_MISSING]
    if not skipped and not missing:
        return
    terminalreporter.section("not tested on this machine", red=True, bold=True)
    for part, reason in sorted(missing.items()):
        terminalreporter.line(f"missing: {part}: {reason}")
    for report in skipped:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        terminalreporter.line(f"skipped: {report.nodeid}: {why}")


def check_flavors(config: pytest.Config) -> None:
    """Raise UsageError for an unknown server, and under `CI=true` for an excluded server."""
    unknown = _flavors(config) - set(FLAVORS)
    if unknown:
        raise pytest.UsageError(
            f"--server-flavors: {', '.join(sorted(unknown))} is none of {', '.join(FLAVORS)}"
        )
    if _in_ci() and (left_out := set(FLAVORS) - _flavors(config)):
        raise pytest.UsageError(
            f"--server-flavors, or PENSTOCK_FLAVORS, leaves {', '.join(sorted(left_out))} out, which CI=true"
            " refuses: unset it, or unset CI to test without these servers"
        )


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true")


def _flavors(config: pytest.Config) -> set[str]:
    return {flavor.strip() for flavor in config.getoption("--server-flavors").split(",") if flavor.strip()}


@pytest.fixture(scope="session", autouse=True)
def _patient_spark(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make every Spark of this process and its children wait as long as the tests do."""
    folder = tmp_path_factory.mktemp("spark-conf")
    write_configuration(folder)
    os.environ["SPARK_CONF_DIR"] = str(folder)


@pytest.fixture(scope="session")
def missing_part(pytestconfig: pytest.Config) -> MissingPart:
    """Skip the calling test because the machine lacks a part; under `CI=true`, fail it."""

    def report(part: str, reason: str) -> NoReturn:
        pytestconfig.stash[_MISSING][part] = reason
        if _in_ci():
            pytest.fail(f"{part} is missing: {reason}", pytrace=False)
        pytest.skip(f"{part} is missing: {reason}")

    return report


@pytest.fixture(scope="session")
def require_flavor(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Skip the calling test if `--server-flavors` leaves a flavor out."""

    def require(flavor: str) -> None:
        if flavor not in _flavors(pytestconfig):
            pytest.skip(f"{flavor}: {_LEFT_OUT}")

    return require


@pytest.fixture(scope="session")
def server_of(
    require_flavor: Callable[[str], None], missing_part: MissingPart
) -> Iterator[Callable[[str], Server]]:
    """Return the shared server of a flavor. It is started when it is first used, and kept for the whole run.

    Fails at the end of the run if a test has changed a global variable, because other tests may depend on it.
    """
    servers: dict[str, Server] = {}
    initial: dict[str, dict[str, str]] = {}

    def get(flavor: str) -> Server:
        require_flavor(flavor)
        try:
            server = servers.get(flavor)
            if server is None:
                server = servers[flavor] = Server(flavor)
            if not server.running:
                initial[flavor] = global_variables(server.start())
            return server
        except PartMissing as error:
            missing_part(f"{flavor} server", str(error))

    yield get
    final = {flavor: global_variables(server) for flavor, server in servers.items() if server.running}
    for server in servers.values():
        server.close()
    changed = {flavor: final[flavor].items() ^ initial[flavor].items() for flavor in final}
    assert not any(changed.values()), f"tests changed shared servers, and have to use start_server: {changed}"


@pytest.fixture(scope="session")
def mysql_server(server_of: Callable[[str], Server]) -> Server:
    """The shared MySQL 9 server."""
    return server_of("mysql")


@pytest.fixture(scope="session")
def mariadb_server(server_of: Callable[[str], Server]) -> Server:
    """The shared MariaDB server of this machine's own distribution."""
    return server_of("mariadb")


@pytest.fixture(scope="session")
def mariadb11_server(server_of: Callable[[str], Server]) -> Server:
    """The shared MariaDB 11.8 server."""
    return server_of("mariadb11")


@pytest.fixture(params=FLAVORS)
def server(request: pytest.FixtureRequest, server_of: Callable[[str], Server]) -> Server:
    """Each flavor's shared server in turn: the test runs once on each."""
    return server_of(request.param)


@pytest.fixture(scope="session")
def zookeeper(missing_part: MissingPart) -> Iterator[ZooKeeper]:
    """The shared ZooKeeper server, an ensemble of one."""
    ensemble = ZooKeeper()
    try:
        ensemble.start()
    except PartMissing as error:
        missing_part("ZooKeeper", str(error))
    yield ensemble
    ensemble.close()


@pytest.fixture
def fresh_database() -> Iterator[FreshDatabase]:
    """Return a function that creates an empty database on a server. The database is dropped after the test.

    Each name is used only once in a run, so that the binlog of a shared server is unambiguous.
    """
    created: list[tuple[Server, str]] = []

    def create(server: Server) -> str:
        name = f"test_{next(_database_numbers):04d}"
        server.sql(f"CREATE DATABASE {name}")
        created.append((server, name))
        return name

    yield create
    for server, name in created:
        if server.running:
            server.sql(f"DROP DATABASE IF EXISTS {name}")


@pytest.fixture(scope="session")
def lend_server(
    pytestconfig: pytest.Config, require_flavor: Callable[[str], None], missing_part: MissingPart
) -> Iterator[LendServer]:
    """Return a function that lends a clean server for a `with` block: tests/support/suite/server_pool.py."""
    pool = ServerPool()

    @contextmanager
    def lend(flavor: str = "mysql", *, tls: bool = False, **options: Any) -> Iterator[Server]:
        require_flavor(flavor)
        if flavor == "mysql":
            # The performance schema takes a third of the processor time of a start. Only the shared server
            # keeps it.
            options.setdefault("performance_schema", False)
        with ExitStack() as stack:
            try:
                server = stack.enter_context(pool.lend(flavor, options, tls=tls))
            except PartMissing as error:
                missing_part(f"{flavor} server", str(error))
            yield server

    yield lend
    pool.close()
    if hasattr(pytestconfig, "workeroutput"):
        pytestconfig.workeroutput["server_pool"] = asdict(pool.counts)
    else:
        pytestconfig.stash[_POOLS].append(pool.counts)


@pytest.fixture(scope="module")
def module_server_of(lend_server: LendServer) -> Iterator[StartServer]:
    """Return the server that a module has for a flavor and options. It is lent to the module when it is first
    used.

    The module's tests share the server. So each test must create its own database, and no test may purge or
    reset the binlog.
    """
    with ExitStack() as stack:

        @functools.cache
        def get(flavor: str = "mysql", *, tls: bool = False, **options: Any) -> Server:
            return stack.enter_context(lend_server(flavor, tls=tls, **options))

        yield get


@pytest.fixture(scope="session")
def type_corpus(lend_server: LendServer) -> Iterator[CorpusOf]:
    """Return the corpus of types of a flavor, on a server that no test changes."""
    with ExitStack() as stack:
        yield functools.cache(lambda flavor: TypeCorpus(stack.enter_context(lend_server(flavor))))


@pytest.fixture
def start_server(lend_server: LendServer) -> Iterator[StartServer]:
    """Return a function that starts a separate server for the test, with its own options."""
    with ExitStack() as stack:

        def start(flavor: str = "mysql", *, tls: bool = False, **options: Any) -> Server:
            return stack.enter_context(lend_server(flavor, tls=tls, **options))

        yield start
