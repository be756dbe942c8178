# SPDX-License-Identifier: Apache-2.0
"""Locating a daemon on the command line: URL forms, the settings file, and a port that speaks TLS."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from penstock.cli.shared.chosen_daemon import daemon_address
from penstock.cli.shared.log_folder import LogFolder
from penstock.cli.shared.rendering import bytes_text, counted
from penstock.errors import OptionInvalid
from penstock.logstore.log import Log
from penstock.settings.daemon import load_settings
from tests.support.daemon.served_log import INSTANCE, captured_log, serving
from tests.support.logstore.kept_log import penstock
from tools.servers import certificate


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("127.0.0.1:7171", "http://127.0.0.1:7171"),
        ("db-host", "http://db-host:7070"),
        ("[::1]:7171", "http://[::1]:7171"),
        ("http://127.0.0.1:7171", "http://127.0.0.1:7171"),
        ("penstock://127.0.0.1:7171", "http://127.0.0.1:7171"),
        ("penstock://127.0.0.1:7171/shop", "http://127.0.0.1:7171"),
        ("https://127.0.0.1:7171", "https://127.0.0.1:7171"),
        ("penstocks://127.0.0.1:7171?ssl_mode=required", "https://127.0.0.1:7171"),
    ],
)
def test_every_form_of_a_daemon_url_is_accepted(url: str, base: str) -> None:
    assert daemon_address(INSTANCE, url, None).base_urls == (base,)


@pytest.mark.parametrize(
    ("url", "mode"),
    [
        (None, "verify_identity"),
        ("db-host", "verify_identity"),
        ("https://db-host", "verify_identity"),
        ("penstocks://db-host?ssl_mode=verify_ca", "verify_ca"),
    ],
)
def test_certificate_authority_implies_tls(url: str | None, mode: str) -> None:
    address = daemon_address(INSTANCE, url, None, Path("/etc/ssl/my ca.pem"))
    assert address.tls is not None
    assert (address.base_urls[0][:8], address.tls.ca, address.tls.mode) == (
        "https://",
        "/etc/ssl/my ca.pem",
        mode,
    )


def test_url_of_something_else_is_refused() -> None:
    with pytest.raises(OptionInvalid, match="is no daemon"):
        daemon_address(INSTANCE, "mysql://127.0.0.1:3306", None)


@pytest.mark.deep(
    guard="tests/unit/test_daemon_urls.py::test_holds_and_tail_accept_every_url_form", keep=("penstock",)
)
@pytest.mark.parametrize("form", ["{}", "http://{}", "penstock://{}"])
def test_holds_and_tail_accept_every_url_form(log: Log, form: str) -> None:
    with serving(log) as daemon:
        url = form.format(f"127.0.0.1:{daemon.port()}")
        assert penstock("holds", "list", INSTANCE, "--url", url).code == 0
        tailed = penstock("tail", INSTANCE, "fuzzed.t", "--from", "earliest", "--count", 1, "--url", url)
        assert (tailed.code, "fuzzed.t" in tailed.out) == (0, True)


def test_plain_http_to_a_tls_port_is_reported(log: Log, tmp_path: Path) -> None:
    certificate.make(tmp_path / "tls")
    names = certificate.server_options(tmp_path / "tls")
    with serving(log, {"tls": {"cert": names["ssl-cert"], "key": names["ssl-key"]}}) as daemon:
        address = f"127.0.0.1:{daemon.port()}"
        for words in (("status",), ("holds", "list", INSTANCE)):
            plain = penstock(*words, "--url", address)
            assert (plain.code, "Does it speak TLS?" in plain.err) == (4, True), plain.err
        trusted = f"https://{address}?ssl_ca={names['ssl-ca']}&ssl_mode=verify_ca"
        assert penstock("holds", "list", INSTANCE, "--url", trusted).code == 0
        unknown = penstock("status", "--url", f"https://{address}")
        assert (unknown.code, "--ca ca.pem" in unknown.err) == (2, True), unknown.err
        for words in (
            ("status", "--json"),
            ("holds", "list", INSTANCE),
            ("tail", INSTANCE, "--from", "earliest", "--count", 1),
        ):
            assert penstock(*words, "--url", address, "--ca", names["ssl-ca"]).code == 0, words
        assert penstock("status", "--url", f"http://{address}", "--ca", names["ssl-ca"]).code == 2


@pytest.mark.parametrize("with_token", [True, False])
def test_settings_file_provides_the_operator_token(log: Log, tmp_path: Path, with_token: bool) -> None:
    access = [
        {"name": "cache", "token": "cache-token"},
        {"name": "operator", "token": "admin-token", "admin": True},
    ]
    listen = {"token": "own-token"} if with_token else {}
    with serving(log, listen, access) as daemon:
        file = tmp_path / "penstock.yaml"
        settings = {
            "listen": {"http": f"127.0.0.1:{daemon.port()}", **listen},
            "access": access,
            "instances": {INSTANCE: {"source": "mysql://nobody@127.0.0.1:1"}},
        }
        file.write_text(yaml.safe_dump(settings))
        assert daemon_address(INSTANCE, None, file).token.reveal() == (
            "own-token" if with_token else "admin-token"
        )
        assert penstock("holds", "list", INSTANCE, "--config", file).code == 0


def test_command_needs_no_secrets_of_others(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = [
        {"name": "cache", "token": "cache-token"},
        {"name": "operator", "token": "admin-token", "admin": True},
    ]
    with serving(log, {}, access) as daemon:
        file = tmp_path / "penstock.yaml"
        file.write_text(
            f"""
            listen: {{http: 127.0.0.1:{daemon.port()}}}
            access:
              - {{name: cache, token_env: CACHE_TOKEN}}
              - {{name: search, token: "${{SEARCH_TOKEN}}"}}
              - {{name: index, user: index, password_file: /nowhere/index}}
              - {{name: first, token: "${{FIRST_TOKEN}}", admin: true}}
              - {{name: operator, token_env: OPERATOR_TOKEN, admin: true}}
            instances:
              {INSTANCE}: {{source: "mysql://repl@127.0.0.1:1", password_file: /nowhere/repl}}
            """
        )
        listed = penstock("holds", "list", INSTANCE, "--config", file)
        assert (listed.code, "FIRST_TOKEN" in listed.err) == (2, True), listed.err
        monkeypatch.setenv("OPERATOR_TOKEN", "admin-token")
        assert penstock("holds", "list", INSTANCE, "--config", file).code == 0
    with pytest.raises(OptionInvalid, match="/nowhere/repl"):
        LogFolder.find(INSTANCE, file).servers()
    with pytest.raises(OptionInvalid, match="CACHE_TOKEN"):
        load_settings(file)


def test_counts_and_sizes_are_human_readable() -> None:
    assert [counted(number, "segment") for number in (0, 1, 1234)] == [
        "0 segments",
        "1 segment",
        "1,234 segments",
    ]
    assert [bytes_text(size) for size in (None, 1, 2048)] == ["-", "1 B", "2.0 KiB"]
