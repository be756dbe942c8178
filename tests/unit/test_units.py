# SPDX-License-Identifier: Apache-2.0
"""Jobs, instances and subscriptions as documents of `penstock export` and `penstock apply`: exported without
secrets, applied as copies.
"""

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.coordinate.backends.memory import MemoryStore
from penstock.coordinate.lease import Lease
from penstock.coordinate.store import open_store
from penstock.coordinate.subscription_record import Selection, Subscription, Subscriptions
from penstock.fleet.job_tenure import JobTenure
from penstock.fleet.jobs import JobSpec, apply_job, read_job, read_run
from penstock.fleet.records import JOBS, job_lease_path, names_below
from penstock.fleet.wanted import WantedInstance, read_wanted, want_instance
from penstock.settings.exported import without_secrets
from tests.support.suite.patience import wait_until

TEXT = """# The orders of a unit.
name: orders-${unit}
state: zookeeper://zk1:2181/states
source: {url: "mysql://repl@db-${unit}", password_file: /run/secrets/repl}
sink: {mysql: {url: mysql://target, user: app, password_env: TARGET_PASSWORD}}
"""
JOB = JobSpec("orders-x", "run", ("--local",), TEXT, zone="north", labels={"unit": "x"}, values={"unit": "x"})


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[MemoryStore]:
    store = MemoryStore(request.node.name.partition("[")[0])
    yield store
    store.close()


def penstock(store: MemoryStore, *words: str, text: str = "") -> Any:
    """Run a command of the product on the store."""
    return CliRunner().invoke(make_app(), [*words, "--coordination", store.url], input=text)


def export(store: MemoryStore, *words: str) -> str:
    """Run the export, and return its output."""
    result = penstock(store, "export", *words)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_unit_is_copied_beside_the_original(store: MemoryStore) -> None:
    apply_job(store, JOB)
    apply_job(store, replace(JOB, name="users", text="name: users", labels={}, values={}))
    text = export(store, "--label", "unit=x")
    assert "name: orders-${unit}\n" in text, "the file stays readable"
    applied = penstock(store, "apply", "--set", "unit=y", text=text)
    assert (applied.exit_code, applied.stdout) == (0, "orders-y: version 1\n"), applied.output
    copied = replace(read_job(store, "orders-y"), updated_us=0)
    assert copied == replace(JOB, name="orders-y", labels={"unit": "y"}, values={"unit": "y"})
    assert read_job(store, "orders-x").version == 1
    # Applying a unit again, or without a change, restarts no job.
    for words in (["--set", "unit=y"], []):
        again = penstock(store, "apply", *words, text=text)
        assert again.stdout == f"orders-{'y' if words else 'x'}: version 1, unchanged\n"


def test_copy_that_would_replace_its_original_is_refused(store: MemoryStore) -> None:
    apply_job(store, replace(JOB, name="orders", text=TEXT.replace("orders-${unit}", "orders")))
    refused = penstock(store, "apply", "--set", "unit=y", text=export(store))
    assert refused.exit_code == 2
    assert "job orders is there already, with other labels: unit=x" in refused.stderr
    assert read_job(store, "orders").labels == {"unit": "x"}


def test_value_without_a_variable_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    apply_job(store, JOB)
    for words in (["apply"], ["apply", str(tmp_path / "orders.yaml")]):
        (tmp_path / "orders.yaml").write_text(TEXT)
        refused = penstock(store, *words, "--set", "unti=y", text=export(store))
        assert (refused.exit_code, "nothing refers to ${unti}" in refused.stderr) == (2, True)
    assert names_below(store, JOBS) == ["orders-x"]


def test_pipeline_file_gets_its_values(store: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "orders.yaml").write_text(TEXT)
    words = ["apply", str(tmp_path / "orders.yaml"), "--local", "--zone", "north", "--label", "unit=x"]
    assert penstock(store, *words, "--set", "unit=x").stdout == "orders-x: version 1\n"
    assert read_job(store, "orders-x") == replace(JOB, updated_us=read_job(store, "orders-x").updated_us)


def test_job_runs_with_its_values(store: MemoryStore, tmp_path: Path) -> None:
    apply_job(store, JOB)
    lease = Lease.acquire(store, store.session(), job_lease_path("orders-x"), "a")
    assert lease is not None
    command = (sys.executable, "-c", "import os; print(os.environ['unit'], 'PATH' in os.environ)")
    tenure = JobTenure(store, "orders-x", lease, tmp_path, command)
    wait_until(lambda: read_run(store, "orders-x").state == "ended")
    tenure.leave("the test ends it", lambda: None)
    wait_until(lambda: tenure.left)
    assert read_run(store, "orders-x").lines == ("x True",)


def test_job_whose_process_cannot_be_started_is_tried_again(store: MemoryStore, tmp_path: Path) -> None:
    apply_job(store, replace(JOB, options=("\0",)))
    lease = Lease.acquire(store, store.session(), job_lease_path("orders-x"), "a")
    assert lease is not None
    tenure = JobTenure(store, "orders-x", lease, tmp_path, (sys.executable,))
    wait_until(lambda: read_run(store, "orders-x").exits)
    assert "cannot be started" in read_run(store, "orders-x").exits[0].why
    tenure.leave("the test ends it", lambda: None)
    wait_until(lambda: tenure.left)


SECRETS = """name: orders # the first
source:
  url: mysql://repl:pass:wo@rd@db1:3306/?ssl_mode=required
  password: "s3cr\\"et"
  token_file: /run/secrets/token
steps:
- mask: {columns: [password], key: hmac-key}
- map: {set: {password: upper(password)}}
sinks:
  cache: {redis: {url: "redis://cache", password: "${CACHE_PASSWORD}"}}
  lake:
    options: {AWS_SECRET_ACCESS_KEY: aws, region: eu}
    key: |
      block
  web: {http: {url: "https://hooktoken@web/in?access_token=tok&x=1", headers: {Authorization: Bearer b}}}
"""


def test_secrets_are_not_exported() -> None:
    exported = without_secrets(SECRETS, "1-orders")
    before, after = yaml.safe_load(SECRETS), yaml.safe_load(exported.text)
    assert after["source"] == {
        "url": "mysql://repl:${_ORDERS_SOURCE_URL_SECRET}@db1:3306/?ssl_mode=required",
        "password": "${_ORDERS_SOURCE_PASSWORD}",
        "token_file": "/run/secrets/token",
    }
    assert after["steps"][0]["mask"]["key"] == "${_ORDERS_STEPS_0_MASK_KEY}"
    assert after["steps"][1] == before["steps"][1]
    assert after["sinks"]["cache"] == before["sinks"]["cache"]
    assert after["sinks"]["lake"]["options"] == {
        "AWS_SECRET_ACCESS_KEY": "${_ORDERS_SINKS_LAKE_OPTIONS_AWS_SECRET_ACCESS_KEY}",
        "region": "eu",
    }
    assert after["sinks"]["web"]["http"] == {
        "url": "https://${_ORDERS_SINKS_WEB_HTTP_URL_SECRET}@web/in"
        "?access_token=${_ORDERS_SINKS_WEB_HTTP_URL_SECRET_2}&x=1",
        "headers": {"Authorization": "${_ORDERS_SINKS_WEB_HTTP_HEADERS_AUTHORIZATION}"},
    }
    assert exported.text.startswith("name: orders # the first\n"), "the rest is as written"
    assert "CACHE_PASSWORD" in exported.references - set(exported.hidden)


def test_secret_in_a_block_is_replaced_with_its_line_end() -> None:
    exported = without_secrets("password: |\n  a\n  b\nname: x\n", "p")
    assert yaml.safe_load(exported.text) == {"password": "${P_PASSWORD}", "name": "x"}


def test_value_of_a_secret_is_not_exported(store: MemoryStore) -> None:
    text = TEXT.replace("password_env: TARGET_PASSWORD", "password: '${pw}'").replace("db-", "db-${host}-")
    apply_job(store, replace(JOB, text=text, values={"unit": "x", "pw": "s3cret", "host": "h"}))
    result = penstock(store, "export")
    assert yaml.safe_load(result.stdout)["values"] == {"unit": "x", "host": "h"}
    assert result.stderr == "job orders-x: a secret is not exported: set pw where the copy runs\n"


def test_subscription_is_exported_and_applied_elsewhere(store: MemoryStore) -> None:
    registry = Subscriptions(store)
    columns = {"shop.orders": ("customer",)}
    registry.create(Subscription("shop", "cache", ("shop.*",), shard_count=4, shard_columns=columns))
    registry.create(Subscription("shop", "audit"))
    registry.select("shop", "cache", lambda _: Selection(where="a = 1", changes=("insert",)))
    labelled = penstock(store, "subscriptions", "set", "cache", "--label", "unit=x")
    assert labelled.exit_code == 0, labelled.output
    assert labelled.stdout == "labels: unit=x\n"
    text = export(store, "--label", "unit=x")
    other = MemoryStore("another-fleet")
    assert penstock(other, "apply", "--set", "unit=y", text=text).stdout == "shop/cache: stored\n"
    original, copied = registry.get("shop", "cache"), Subscriptions(other).get("shop", "cache")
    assert original is not None
    assert copied is not None
    assert copied.labels == {"unit": "y"}
    for field in ("tables", "shard_count", "shard_columns", "selection", "paused"):
        assert getattr(copied, field) == getattr(original, field), field
    refused = penstock(store, "apply", "--set", "unit=y", text=text)
    assert "subscription shop/cache is there already, with other labels: unit=x" in refused.stderr
    other.close()


INSTANCE = """instance: shop-y
values: {unit: y}
settings:
  source: mysql://repl@db-${unit}
  password_file: /run/secrets/repl
  labels: {unit: y}
"""


def test_instance_is_exported_from_a_file_and_from_the_store(store: MemoryStore, tmp_path: Path) -> None:
    assert penstock(store, "apply", text=INSTANCE).stdout == "shop-y: version 1\n"
    config = tmp_path / "penstock.yaml"
    config.write_text(
        f"coordination: sqlite://{tmp_path}/coordination.db\n"
        "instances:\n  shop-x: {source: 'mysql://repl:pw@db-x', labels: {unit: x}}\n  other: {source: 'mysql://h'}\n"
    )
    result = CliRunner().invoke(make_app(), ["export", "--label", "unit=x", "--config", str(config)])
    assert yaml.safe_load(result.stdout) == {
        "instance": "shop-x",
        "values": {},
        "settings": {"source": "mysql://repl:${SHOP_X_SOURCE_SECRET}@db-x", "labels": {"unit": "x"}},
    }
    assert "set SHOP_X_SOURCE_SECRET where the copy runs" in result.stderr
    assert yaml.safe_load(export(store)) == yaml.safe_load(INSTANCE)
    refused = penstock(store, "apply", "--set", "unit=z", text=export(store))
    assert "instance shop-y is there already, with other labels: unit=y" in refused.stderr
    renamed = export(store).replace("shop-y", "shop-z")
    assert penstock(store, "apply", "--set", "unit=z", text=renamed).stdout == "shop-z: version 1\n"
    wanted = read_wanted(store)["shop-z"]
    assert wanted.values == {"unit": "z"}
    assert wanted.text is not None
    assert "unit: z" in wanted.text


def test_member_of_a_merge_is_removed_after_the_merge(tmp_path: Path) -> None:
    url, config = f"sqlite://{tmp_path}/coordination.db", tmp_path / "penstock.yaml"
    instances = {"a": {"source": "mysql://h"}, "b": {"source": "mysql://i"}, "all": {"merge": ["a", "b"]}}
    config.write_text(yaml.safe_dump({"coordination": url, "instances": instances}))
    with closing(open_store(url)) as store:
        want_instance(store, WantedInstance("both", "merge: [a, c]\n"))
        want_instance(store, WantedInstance("c", "source: mysql://j\n"))

    def remove(name: str) -> Any:
        return CliRunner().invoke(make_app(), ["instances", "remove", name, "--config", str(config)])

    assert "c is a member of the merge both" in remove("c").stderr
    assert "b is a member of the merge all" in remove("b").stderr
    for name in ("both", "c", "all", "b"):
        assert remove(name).exit_code == 0


def test_removed_instance_is_not_exported(store: MemoryStore) -> None:
    penstock(store, "apply", text=INSTANCE)
    assert "Known here: shop-y" in penstock(store, "instances", "remove", "shop-z").stderr
    assert penstock(store, "instances", "remove", "shop-y").exit_code == 0
    assert penstock(store, "instances", "list").stdout.split() == ["shop-y", "version", "2,", "removed"]
    assert export(store) == ""
    assert penstock(store, "instances", "forget", "shop-y").exit_code == 0
    assert penstock(store, "instances", "list").stdout == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("job: a\ntext: 'name: a'\nlabel: {}", "label: unknown; did you mean labels?"),
        ("job: a\n", "text: it is missing"),
        ("job: a\ntext: ''\n--- {}\n", "document 2 of standard-input.yaml is of no kind"),
        ("job: a\ntext: 'name: ../a\n\n\n  state: zookeeper://h:1/p'\n", "cannot name a job"),
        ("subscription: a\n", "subscription: string should match"),
        ("subscription: a/b\nshard_count: 0\n", "shard_count: input should be"),
        ("job: a\ntext: 'name: ${a=b}'\nvalues: {a=b: c}\n", "string should match"),
        ('job: a\ntext: "name: ${a}"\nvalues: {a: "\\0"}\n', "string should match"),
        ("instance: a\nsettings: {source: 'mysql://u:pw@h'}\n", "a secret is written out"),
        ("instance: a\nsettings: {source: 'mysql://h', tabels: x}\n", "did you mean tables"),
        ("instance: a\nsettings: {source: 'tidb://h:1'}\n", "is a TiDB cluster"),
        ("subscription: a/b\nselection: {where: 'a ='}\n", "OptionInvalid"),
    ],
)
def test_wrong_document_is_refused(store: MemoryStore, text: str, problem: str) -> None:
    refused = penstock(store, "apply", text=text)
    assert refused.exit_code == 2, refused.output
    assert problem in refused.stderr
    assert not names_below(store, "/subscriptions")
