# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.errors import OptionInvalid
from penstock.settings.daemon import Settings, bytes_of, json_schema, load_settings, seconds_of

SMALLEST = "instances: {shop: {source: 'mysql://repl@db1'}}"


def load(tmp_path: Path, text: str, **environment: str) -> Settings:
    path = tmp_path / "penstock.yaml"
    path.write_text(text)
    return load_settings(path, environment)


def refusal(tmp_path: Path, text: str, **environment: str) -> str:
    with pytest.raises(OptionInvalid) as refused:
        load(tmp_path, text, **environment)
    return refused.value.message


def test_smallest_file_is_an_instance_and_its_source(tmp_path: Path) -> None:
    settings = load(tmp_path, SMALLEST)
    assert (settings.listen.host, settings.listen.port) == ("127.0.0.1", 7070)
    assert [str(address) for address in settings.instances["shop"].addresses()] == ["mysql://repl@db1:3306"]
    assert settings.log_of("shop").folder == Path("penstock-log/shop")
    assert settings.log_of("shop").retention.age == 24 * 3600


def test_instance_may_override_parts_of_its_log(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        """
        log: {folder: /logs, block_bytes: 128KiB, retention: {age: 2d, bytes: 10GiB}}
        instances:
          shop: {source: mysql://repl@db1, log: {fsync: block, retention: {age: 1h}}}
          stock: {source: mysql://repl@db2, log: {folder: /elsewhere, memory_bytes: 1GB}}
        """,
    )
    shop, stock = settings.log_of("shop"), settings.log_of("stock")
    assert (shop.folder, shop.fsync, shop.block_bytes) == (Path("/logs/shop"), "block", 128 * 1024)
    assert (shop.retention.age, shop.retention.bytes) == (3600, 10 << 30)
    assert (stock.folder, stock.fsync, stock.memory_bytes) == (Path("/elsewhere"), "seconds", 10**9)
    assert stock.retention.age == 2 * 86_400


@pytest.fixture
def shop_password(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SHOP_PASSWORD", "sesame-42")
    return "sesame-42"


def test_further_servers_share_account_password_and_tls(tmp_path: Path, shop_password: str) -> None:
    text = """
    instances:
      shop:
        source: mysql://repl@db1:3307?ssl_mode=required
        servers: [db2, 'db3:3309', '[::1]:3310', 'mysql://other@db4']
        password_env: SHOP_PASSWORD
        server_id: 4242
    """
    servers = load(tmp_path, text).instances["shop"].addresses()
    assert [(server.host, server.port, server.user) for server in servers] == [
        ("db1", 3307, "repl"),
        ("db2", 3307, "repl"),
        ("db3", 3309, "repl"),
        ("::1", 3310, "repl"),
        ("db4", 3306, "other"),
    ]
    assert {server.password.reveal() for server in servers} == {shop_password}
    assert {server.server_id for server in servers} == {4242}
    assert [server.tls.mode for server in servers[:4]] == ["required"] * 4


def test_every_problem_is_reported_at_once_with_its_line_and_a_suggestion(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        "\n".join(
            [
                "listen: {http: '0.0.0.0:7070', tls: {cert: /nowhere.pem, key: /nowhere.pem}}",
                "log: {fsync: sometimes, retention: {aeg: 24h}}",
                "instances:",
                "  shop:",
                "    sorce: mysql://repl@db1",
                "    server_id: 0",
                "  stock:",
                "    source: postgres://repl@db2",
                "    tables: [orders]",
                "  ../up: {source: mysql://repl@db3}",
            ]
        ),
    )
    for line, key, what in [
        (1, "listen.insecure", "token"),
        (1, "listen.tls.cert", "cannot be read"),
        (2, "log.fsync", "'never'"),
        (2, "log.retention.aeg", "did you mean age?"),
        (5, "instances.shop.sorce", "did you mean source?"),
        (6, "instances.shop.server_id", "1"),
        (8, "instances.stock.source", "mysql://"),
        (9, "instances.stock.tables", "'orders'"),
        (10, "instances.../up", "is no name"),
    ]:
        problem_lines = [text for text in message.splitlines() if f"penstock.yaml:{line}: {key}: " in text]
        assert len(problem_lines) == 1, (key, message)
        assert what in problem_lines[0]


@pytest.mark.parametrize(
    ("listen", "allowed"),
    [
        ("{http: '127.0.0.1:7070'}", True),
        ("{http: 'localhost:0'}", True),
        ("{http: '[::1]:7070'}", True),
        ("{http: '0.0.0.0:7070'}", False),
        ("{http: 'some-host:7070'}", False),
        ("{http: '0.0.0.0:7070', token: 'a-token'}", True),
        ("{http: '0.0.0.0:7070', token_file: TOKEN_FILE}", True),
        ("{http: '0.0.0.0:7070', insecure: true}", True),
    ],
)
def test_listening_beyond_loopback_needs_a_token(tmp_path: Path, listen: str, allowed: bool) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    text = f"listen: {listen}\n{SMALLEST}".replace("TOKEN_FILE", str(tmp_path / "token"))
    if allowed:
        settings = load(tmp_path, text)
        secret = settings.listen.secret()
        if "token_file" in listen:
            assert secret is not None
            assert secret.reveal() == "from-a-file"
    else:
        assert "insecure: true" in refusal(tmp_path, text)


def test_variable_is_replaced_by_its_value_and_a_missing_one_is_reported(tmp_path: Path) -> None:
    text = "instances: {shop: {source: 'mysql://repl@${HOST}', password: 'a$$b-${WORD}'}}"
    settings = load(tmp_path, text, HOST="db9", WORD="open")
    address = settings.instances["shop"].addresses()[0]
    assert (address.host, address.password.reveal()) == ("db9", "a$b-open")
    message = refusal(tmp_path, text, HOST="db9")
    assert "instances.shop.password: the environment has no variable WORD" in message


def test_settings_print_no_secret(tmp_path: Path, shop_password: str) -> None:
    text = f"""
    listen: {{token: {shop_password}}}
    instances:
      shop: {{source: 'mysql://repl:{shop_password}@db1', servers: ['mysql://a:{shop_password}@db2']}}
      stock: {{source: mysql://repl@db1, password: {shop_password}}}
      store: {{source: mysql://repl@db1, password_env: SHOP_PASSWORD}}
    """
    settings = load(tmp_path, text)
    assert {instance.addresses()[0].password.reveal() for instance in settings.instances.values()} == {
        shop_password
    }
    assert shop_password not in f"{settings!r} {settings}"
    for broken in ("server_id: none", "source: 'mysql://a:sesame-42@db1/database'", "password: [sesame-42]"):
        message = refusal(tmp_path, f"instances: {{shop: {{source: mysql://repl@db1, {broken}}}}}")
        assert shop_password not in message


def test_secret_is_configured_in_only_one_way(tmp_path: Path, shop_password: str) -> None:
    text = "instances: {shop: {source: mysql://repl@db1, password: a, password_env: SHOP_PASSWORD}}"
    assert "is enough" in refusal(tmp_path, text)
    text = "instances: {shop: {source: mysql://repl@db1, password_file: /nowhere}}"
    assert "/nowhere cannot be read" in refusal(tmp_path, text)


LIMITS = {
    "canal_where: {shop.orders: 'region ='}": "shop.orders: where: 'region =' is no condition",
    "canal_where: {'shop.a,shop.b': id = 1}": "more than one table pattern",
    "canal_where: {shop.orders: [id]}": "canal_where",
    "canal_where: {shop.orders: id + 1 = 2}": "'id + 1' is not understood",
    "canal_columns: {shop.users: id}": "canal_columns",
    "canal_columns: {shop.users: []}": "write one or more columns, each once",
    "canal_columns: {shop.users: [id, id]}": "write one or more columns, each once",
    "canal_columns: [shop.users]": "canal_columns",
    "canal_colums: {}": "canal_columns",
}


@pytest.mark.parametrize("setting", LIMITS)
def test_limits_of_a_canal_destination_are_refused_by_name(tmp_path: Path, setting: str) -> None:
    text = f"instances:\n  shop: {{source: 'mysql://repl@h', {setting}}}\n"
    message = refusal(tmp_path, text)
    assert LIMITS[setting] in message
    assert "instances.shop.canal_" in message


def test_duplicate_name_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, f"log: {{}}\n{SMALLEST}\nlog: {{fsync: never}}")
    assert "penstock.yaml:3: log: it stands twice, here and on line 1" in message


def test_invalid_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text("listen:\n  http: [\n")
    with pytest.raises(OptionInvalid) as refused:
        load_settings(tmp_path / "penstock.yaml", {})
    assert (refused.value.position or "").endswith("penstock.yaml:3")
    with pytest.raises(OptionInvalid, match="cannot be read"):
        load_settings(tmp_path / "nowhere.yaml", {})


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30s", 30), ("15m", 900), ("24h", 86_400), ("7d", 604_800), (3, 3)]
)
def test_durations_have_units(text: Any, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"), [("64KiB", 65_536), ("1GiB", 1 << 30), ("10GB", 10**10), ("1.5 MiB", 3 << 19), (7, 7)]
)
def test_bytes_have_units(text: Any, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("wrong", ["", "h", "1 week", "-1s", -1, True, None, "1GiBs"])
def test_invalid_amount_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"number|duration|below"):
        seconds_of(wrong)
    with pytest.raises(ValueError, match=r"number|below"):
        bytes_of(wrong)


def test_port_alone_is_not_an_address(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("listen: {canal: '11111'}\n", encoding="utf-8")
    with pytest.raises(OptionInvalid, match=r"listen\.canal: write host:port: 127\.0\.0\.1:11111"):
        load_settings(file)


@pytest.mark.parametrize(
    ("further", "refused"),
    [
        ("listen: {canal: '0.0.0.0:11111'}", "canal: 0.0.0.0:11111"),
        ("listen: {canal: '127.0.0.1:11111', ptubes: '0.0.0.0:28332'}", "ptubes: 0.0.0.0:28332"),
        ("listen: {ptubes_monitor: 'some-host:23333'}", "ptubes_monitor: some-host:23333"),
        ("listen: {canal: '0.0.0.0:11111', ptubes: '[::]:28332', insecure: [canal]}", "ptubes: [::]:28332"),
        ("listen: {canal: '0.0.0.0:11111', insecure: [canal]}", None),
        ("listen: {canal: '0.0.0.0:11111', insecure: true}", None),
        ("listen: {canal: '0.0.0.0:11111', token: a}", None),
        ("listen: {canal: '0.0.0.0:11111'}\naccess: [{name: a, user: b, password: c}]", None),
        ("listen: {canal: null, ptubes: '127.0.0.1:0'}", None),
    ],
)
def test_each_listener_beyond_loopback_needs_credentials(
    tmp_path: Path, further: str, refused: str | None
) -> None:
    text = f"{further}\n{SMALLEST}"
    if refused is None:
        load(tmp_path, text)
    else:
        message = refusal(tmp_path, text)
        assert "listen.insecure" in message
        assert refused in message
        assert message.count("can be reached") == 1


def test_unauthenticated_listeners_are_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, f"listen: {{insecure: [kanal]}}\n{SMALLEST}")
    assert "listen.insecure: write true, false, or listeners: http, canal" in message
    listen = load(tmp_path, f"listen: {{canal: '[::1]:0'}}\n{SMALLEST}").listen
    assert listen.addresses() == {"http": ("127.0.0.1", 7070), "canal": ("::1", 0)}


def test_accounts_are_parsed_and_their_secrets_hidden(tmp_path: Path, shop_password: str) -> None:
    text = f"""
    access:
      - {{name: cache, token: {shop_password}, instances: shop, tables: shop.*, bytes_per_second: 10MiB}}
      - {{name: search, user: canal, password_env: SHOP_PASSWORD, subscriptions: [canal-*], admin: true}}
    {SMALLEST}
    """
    settings = load(tmp_path, text)
    cache, search = settings.access
    assert (cache.instances, cache.tables, cache.bytes_per_second) == (("shop",), ("shop.*",), 10 << 20)
    assert (cache.subscriptions, cache.admin, cache.requests_max) == (("*",), False, None)
    assert (search.user, search.admin, search.token_secret()) == ("canal", True, None)
    assert cache.token_secret() == search.password_secret()
    assert shop_password not in f"{settings!r} {settings}"


def test_every_problem_of_an_account_is_reported(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        "\n".join(
            [
                "access:",
                "  - {name: nobody}",
                "  - {name: half, user: canal}",
                "  - {name: double, token: a, token_env: B}",
                "  - {name: wrong, token: c, tabels: [shop.*], requests_max: 0}",
                "  - {name: odd, token: d, tables: [orders]}",
                "  - {name: rows, token: e, where: {'shop.*': 'region = ', shop.users: country = 'de'}}",
                "  - {name: listed, token: h, columns: {shop.users: []}}",
                "  - {name: pattern, token: f, where: {'shop.a,shop.b': id = 1}}",
                "  - {name: sum, token: g, where: {shop.orders: id + 1 = 2}}",
                SMALLEST,
            ]
        ),
    )
    for line, key, what in [
        (2, "access[0].password_env", "nothing tells who this is"),
        (3, "access[1].password_env", "go together"),
        (4, "access[2].token_env", "is enough"),
        (5, "access[3].tabels", "did you mean tables?"),
        (5, "access[3].requests_max", "1"),
        (6, "access[4].tables", "'orders'"),
        (7, "access[5].where", "shop.*: where: 'region = ' is no condition"),
        (8, "access[6].columns", "shop.users: write one or more columns"),
        (9, "access[7].where", "'shop.a,shop.b' is more than one table pattern"),
        (10, "access[8].where", "shop.orders: where: 'id + 1' is not understood"),
    ]:
        problem_lines = [text for text in message.splitlines() if f"penstock.yaml:{line}: {key}: " in text]
        assert len(problem_lines) == 1, (key, message)
        assert what in problem_lines[0]


@pytest.mark.parametrize("what", ["name: a, token: b", "name: b, token: a", "name: c, user: u, password: x"])
def test_two_accounts_are_distinguished(tmp_path: Path, what: str) -> None:
    text = f"access: [{{name: a, token: a, user: u, password: p}}, {{{what}}}]\n{SMALLEST}"
    assert "have the same" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("written", "expected_url"),
    [
        (None, "sqlite://{logs}/coordination.db"),
        ("sqlite:///var/lib/own.db", "sqlite:///var/lib/own.db"),
        ("sqlite:own.db", "sqlite://{here}/own.db"),
        ("zookeeper://h1:2181,h2:2181/root", "zookeeper://h1:2181,h2:2181/root"),
        ("sqlite://own.db", None),
        ("sqlite:///", None),
        ("mysql://db1/coordination", None),
        ("zookeeper:h1", None),
    ],
)
def test_coordination_store_has_a_default_location(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str | None, expected_url: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"log: {{folder: logs}}\n{SMALLEST}\ncoordination: {written or 'null'}"
    if expected_url is None:
        assert "coordination: write sqlite:///" in refusal(tmp_path, text)
    else:
        expected = expected_url.format(logs=tmp_path / "logs", here=tmp_path)
        assert load(tmp_path, text).coordination_url() == expected


def test_shard_columns_are_listed_by_table_pattern(tmp_path: Path) -> None:
    text = "instances: {shop: {source: mysql://repl@db1, shard_columns: {SHARDS}}}"
    settings = load(tmp_path, text.replace("SHARDS", "shop.orders: [customer_id], '*.*': [id, part]"))
    assert settings.instances["shop"].shard_columns == {
        "shop.orders": ("customer_id",),
        "*.*": ("id", "part"),
    }
    for wrong in ("orders: [a]", "shop.a: []", "shop.a: [b, b]", "'shop.a,shop.b': [c]"):
        assert "instances.shop.shard_columns: " in refusal(tmp_path, text.replace("SHARDS", wrong))


def test_time_may_be_written_without_quotes(tmp_path: Path) -> None:
    text = "instances: {shop: {source: mysql://repl@db1, start: 2026-11-21T08:00:00Z}}"
    assert load(tmp_path, text).instances["shop"].start == "2026-11-21T08:00:00Z"


def test_editor_schema_names_every_section() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == {
        *("access", "alerts", "console", "coordination", "fleet", "instances", "listen", "listeners", "log"),
        "metrics",
        "processes",
        "telemetry",
    }
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("processes", "groups"),
    [
        ("single", []),
        ("per-instance", [["a"], ["b"], ["c"]]),
        (2, [["a", "c"], ["b"]]),
        (5, [["a"], ["b"], ["c"]]),
    ],
)
def test_instances_with_files_are_shared_among_capture_processes(
    processes: str | int, groups: list[list[str]]
) -> None:
    source = {"source": "mysql://u@db1"}
    instances = {"a": source, "b": source, "memory": {**source, "log": {"mode": "memory"}}, "c": source}
    settings = Settings.model_validate({"processes": processes, "instances": instances})
    assert settings.process_groups() == groups


def test_instances_of_a_fleet_share_no_capture_process() -> None:
    values = {
        "processes": 2,
        "coordination": "zookeeper://zk1/penstock",
        "fleet": {},
        "instances": {"a": {"source": "mysql://u@db1"}},
    }
    with pytest.raises(ValidationError, match="processes: per-instance"):
        Settings.model_validate(values)
    assert Settings.model_validate({**values, "processes": "per-instance"}).has_process("a")
