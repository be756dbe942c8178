# SPDX-License-Identifier: Apache-2.0
"""Pipeline settings in a file and in a program."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import penstock
from penstock.cli.app import make_app
from penstock.errors import OptionInvalid, SourceMissing
from penstock.model import Position
from penstock.pipeline.settings import (
    EARLIEST,
    PipelineSettings,
    load_pipeline,
)
from penstock.pipeline.settings_schema import json_schema
from penstock.pipeline.step import verbs
from penstock.sinks.sink import Evolution, kinds
from penstock.source.bounds import Bound
from tests.tidy.tree import ROOT

SMALLEST = "source: {url: 'mysql://repl@db1:3306'}\nsink: stdout\n"


def load(folder: Path, text: str, **environment: str) -> PipelineSettings:
    path = folder / "shop.yaml"
    path.write_text(text)
    return load_pipeline(path, environment)


def refusal(folder: Path, text: str, **environment: str) -> str:
    with pytest.raises(OptionInvalid) as refused:
        load(folder, text, **environment)
    return refused.value.message.replace(str(folder / "shop.yaml"), "FILE")


def test_smallest_file_is_a_source_and_a_sink(tmp_path: Path) -> None:
    settings = load(tmp_path, SMALLEST)
    assert (settings.name, settings.sink.kind, settings.steps) == ("shop", "stdout", ())
    assert settings.state == f"sqlite://{tmp_path}/penstock-pipelines.db"
    assert settings.dead_letter == f"{tmp_path}/shop.dead-letter"
    (source,) = settings.sources
    assert (source.name, source.start, str(source.server)) == ("db1:3306", None, "mysql://repl@db1:3306")
    assert (settings.load.mode, settings.apply, settings.schema_changes) == (
        "full",
        "parallel",
        Evolution.EVOLVE,
    )
    assert (settings.errors.table, settings.errors.rows) == ("stop", "stop")
    assert settings.make_sink().kind == "stdout"


def test_complete_file_is_parsed_as_written(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        """
        name: lake
        state: zookeeper://zk1:2181/penstock
        source:
          url: mysql://repl@db1
          name: shop
          password: ${SHOP_PASSWORD}
          tables: [shop.*, /crm\\..*/]
          exclude: shop.tmp_*
          start: mysql-bin.000003:1542
          server_id: 77
          tls: {mode: required}
        load: {mode: consistent, chunk_rows: 1000, rate: 5000, where: {shop.orders: "created > '2026-01-01'"}}
        steps:
          - filter: "total > 0"
          - mask: {tables: shop.customers, columns: {email: hash}}
          - dedupe
          - python: {function: "json:dumps"}
        sink: {mysql: {url: "mysql://writer:secret@db2"}}
        batch: {bytes: 64MiB, rows: 100000, interval: 5s, parts: 8, range_bytes: 16MiB}
        schema_changes: add_only
        apply: serial
        errors: {table: skip_table, rows: dead_letter, retry_for: 1h}
        dead_letter: s3://bucket/letters
        loops: {server_ids: [9], gtid_tags: ours}
        spark: {spark.sql.shuffle.partitions: "8"}
        """,
        SHOP_PASSWORD="sesame",
    )
    (source,) = settings.sources
    assert settings.source("shop") is source
    assert source.options.address is not None
    assert source.options.address.password.reveal() == "sesame"
    assert (source.options.address.tls.mode, source.options.address.server_id) == ("required", 77)
    assert source.start == Bound(position=Position(0, "mysql-bin.000003", 1542))
    assert source.tables.matches("crm", "people")
    assert not source.tables.matches("shop", "tmp_1")
    assert settings.load.where_of("shop", "orders") == "created > '2026-01-01'"
    assert settings.load.where_of("shop", "others") is None
    assert [step.verb for step in settings.steps] == ["filter", "mask", "dedupe", "python"]
    # A step without its own error policy uses the pipeline's policy.
    assert [getattr(step.settings, "on_error", "-") for step in settings.steps] == [
        "dead_letter",
        "-",
        "-",
        "dead_letter",
    ]
    assert (settings.batch.bytes, settings.batch.interval, settings.errors.retry_for) == (64 << 20, 5.0, 3600)
    assert settings.dead_letter == "s3://bucket/letters"
    assert settings.loops.gtid_tags == ("ours",)
    # A sink with several write modes uses the pipeline's mode.
    assert settings.sink.settings.apply == "serial"  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert "sesame" not in repr(settings)
    assert "secret" not in repr(settings)


def test_servers_of_a_fleet_share_the_settings_of_source(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        """
        source: {user: repl, password: x, tables: ["shop_*.orders_*"], start: earliest}
        sources:
          - {url: "mysql://db1", name: a}
          - {url: "mysql://db2:3307", name: b, tables: [shop_9.*]}
          - {path: [/backup/one, /backup/two], name: old}
        sink: stdout
        """,
    )
    a, b, old = settings.sources
    assert (a.options.address.user, a.start, str(b.server)) == ("repl", EARLIEST, "mysql://repl@db2:3307")  # type: ignore[union-attr]
    assert b.tables.include == ("shop_9.*",)
    assert (old.options.paths, old.server) == (("/backup/one", "/backup/two"), None)


def test_daemon_or_files_may_name_the_server_of_their_log(tmp_path: Path) -> None:
    source_text = "{url: 'penstock://h:7070/shop', token: t, server: 'mysql://db1', user: u, password: p}"
    (source,) = load(tmp_path, f"source: {source_text}\nsink: stdout").sources
    assert source.name == "shop"
    assert source.options.daemon is not None
    assert source.options.daemon.token.reveal() == "t"
    assert str(source.server) == "mysql://u@db1:3306"
    assert source.server is not None
    assert source.server.password.reveal() == "p"


def test_every_problem_is_reported_at_once_with_its_line_and_a_suggestion(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        """source: {url: "mysql://repl@db1", tabels: [a.b]}
steps:
  - filtr: x
  - filter: "total >"
  - mask: {colums: {email: hash}}
  - map: {add: {}, drop: [a], keep: [b]}
  - {filter: x, only: y}
  - route: {to: orders}
sink:
  mysqll: {}
load: {mode: everything}
batch: {bytes: lots}
${WHAT}: 1
password: ${NOPE}
""",
    )
    for problem in (
        "FILE:1: source.tabels: unknown; did you mean tables?",
        "FILE:3: steps[0].filtr: there is no step 'filtr'. Did you mean filter?",
        "FILE:4: steps[1].filter.where: filter: where: 'total >' is no condition",
        "FILE:5: steps[2].mask.colums: unknown; did you mean columns?",
        "FILE:6: steps[3].map: keep and drop are one too many",
        "FILE:7: steps[4]: write one name and what belongs to it",
        "FILE:8: steps[5].route.to: write database.table",
        "FILE:10: sink.mysqll: there is no sink 'mysqll'. Did you mean mysql?",
        "FILE:11: load.mode",
        "FILE:12: batch.bytes",
        "FILE:14: password: the environment has no variable NOPE",
    ):
        assert problem in message, f"{problem}\n{message}"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("sink: stdout", "source is missing"),
        ("source: {url: 'mysql://h'}", "sink: it is missing"),
        ("source: {}\nsink: stdout", "set either url or path"),
        ("source: {url: 'mysql://h', path: x}\nsink: stdout", "set either url or path"),
        ("source: {url: 'http://h'}\nsink: stdout", "mysql://user@host:3306 or penstock://"),
        ("source: {url: 'mysql://h', server: 'mysql://i'}\nsink: stdout", "url already names the server"),
        ("source: {url: 'mysql://h', start: yesterday}\nsink: stdout", "no position, GTID set or time"),
        ("sources: [{url: 'mysql://h'}, {url: 'mysql://h'}]\nsink: stdout", "another source is named"),
        ("source: {url: 'mysql://h'}\nsink: stdout\nstate: here.db", "sqlite:///path"),
        ("source: {url: 'mysql://h'}\nsink: stdout\nsteps: {filter: x}", "write a list"),
        (
            "source: {url: 'mysql://h'}\nsink: stdout\nload: {where: {'a.*,b.*': x}}",
            "not a single table pattern",
        ),
        ("source: {url: 'mysql://h', password: x, password_env: Y}\nsink: stdout", "is enough"),
        ("[1, 2]", "dictionary"),
    ],
)
def test_contradictory_settings_are_refused(tmp_path: Path, text: str, what: str) -> None:
    assert what in refusal(tmp_path, text)


def test_errors_reveal_no_secret(tmp_path: Path) -> None:
    source = "{url: 'mysql://u:sesame@h/db', password: [sesame]}"
    sink = "{mysql: {url: 'mysql://u:sesame@h', nmae: 1}}"
    assert "sesame" not in refusal(tmp_path, f"source: {source}\nsink: {sink}")


def test_secrets_are_resolved_where_the_pipeline_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASK_KEY", "pepper")
    (tmp_path / "password").write_text("sesame\n")
    text = f"""
    source: {{url: "mysql://repl@db1"}}
    steps: [{{mask: {{columns: {{email: hash}}, key_env: MASK_KEY}}}}]
    sink: {{mysql: {{url: "mysql://writer@db2", password_file: {tmp_path}/password}}}}
    """
    pickled = pickle.dumps(load(tmp_path, text))
    monkeypatch.delenv("MASK_KEY")
    (tmp_path / "password").unlink()
    settings = pickle.loads(pickled)
    assert len(settings.make_steps()) == 1
    assert settings.sink.settings.secret().reveal() == "sesame"
    assert settings.make_sink().kind == "mysql"


def test_pipeline_of_a_program_equals_that_of_a_file(tmp_path: Path) -> None:
    def enrich(batch: Any) -> Any:
        return batch

    pipeline = penstock.Pipeline(
        source=["mysql://repl@db1", {"url": "mysql://repl@db2", "name": "two"}],
        tables="shop.*",
        steps=["dedupe", {"filter": "id > 1"}, enrich],
        sink="stdout",
        load="none",
        folder=tmp_path,
    )
    assert [source.name for source in pipeline.settings.sources] == ["db1:3306", "two"]
    assert [step.verb for step in pipeline.settings.steps] == ["dedupe", "filter", "python"]
    assert pipeline.settings.state == f"sqlite://{tmp_path}/penstock-pipelines.db"
    again = penstock.Pipeline(source="mysql://repl@db1", sink="stdout")
    other = penstock.Pipeline(source="mysql://repl@db3", sink="stdout")
    assert again.settings.name == penstock.Pipeline(source="mysql://repl@db1", sink="stdout").settings.name
    assert len({pipeline.settings.name, again.settings.name, other.settings.name}) == 3
    with pytest.raises(OptionInvalid, match="2 problems"):
        penstock.Pipeline(source="mysql://repl@db1", sink="stdotu", laod="none")
    file = tmp_path / "shop.yaml"
    file.write_text(SMALLEST)
    assert penstock.Pipeline.load(file).settings == load_pipeline(file)


def test_report_has_its_former_name_for_one_version(tmp_path: Path) -> None:
    reports: list[Mapping[str, Any]] = []
    pipeline = penstock.Pipeline(source={"path": "/no/such.log"}, sink="stdout", load="none", folder=tmp_path)
    with pytest.warns(DeprecationWarning, match="told is now report") as warned, pytest.raises(SourceMissing):
        pipeline.run(local=True, told=reports.append)
    assert warned[0].filename == __file__
    assert reports[-1]["state"] == "failed"
    with pytest.raises(TypeError, match="both given"):
        pipeline.run(local=True, report=reports.append, told=reports.append)


# --- For editors ----------------------------------------------------------------------------


def test_schema_contains_every_step_and_every_sink() -> None:
    run = CliRunner().invoke(make_app(), ["run", "--json-schema"])
    schema = json.loads(run.stdout)
    assert schema == json_schema()
    assert {f"step_{verb}" for verb in verbs()} | {f"sink_{kind}" for kind in kinds()} <= set(schema["$defs"])
    named = set(_references(schema))
    assert named <= {f"#/$defs/{name}" for name in schema["$defs"]}


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [reference for inner in value.values() for reference in _references(inner)]
    return (
        [reference for inner in value for reference in _references(inner)] if isinstance(value, list) else []
    )


EXAMPLES = sorted((ROOT / "examples/pipelines").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_a_valid_pipeline(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An example's functions are in the example's folder.
    monkeypatch.chdir(path.parent)
    for variable in ("SHOP_PASSWORD", "LAKE_PASSWORD", "MASK_KEY", "PENSTOCK_TOKEN"):
        monkeypatch.setenv(variable, "-")
    settings = load_pipeline(path)
    assert settings.make_steps() is not None
    assert settings.make_sink().kind == settings.sink.kind


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5
