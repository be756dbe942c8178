# SPDX-License-Identifier: Apache-2.0
"""`ca` of a server: its certificate is verified, or the setting is refused."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.errors import TlsFailed
from penstock.model import Tls
from penstock.pipeline.load.session import open_session
from penstock.pipeline.steps.lookup import LookupServer
from penstock.sinks.mysql.sink import MysqlSink
from penstock.sinks.mysql.sink import Settings as MysqlSettings
from penstock.sinks.postgres.connection import verified_tls
from penstock.sinks.sink import settings_of
from tools.servers import Server

CA = Path("/etc/ca.pem")


@pytest.mark.parametrize("settings", [MysqlSettings, LookupServer])
@pytest.mark.parametrize(
    ("query", "mode"),
    [
        ("", "verify_identity"),
        ("?ssl_mode=preferred", "verify_identity"),
        ("?ssl_mode=disabled", "verify_identity"),
        ("?ssl_mode=verify_ca", "verify_ca"),
        ("?ssl_ca=/etc/other.pem", "verify_identity"),
    ],
)
def test_certificate_is_verified_unless_the_url_only_leaves_out_the_name(
    settings: Any, query: str, mode: str
) -> None:
    assert settings(url=f"mysql://db1{query}", ca=CA).address().tls == Tls(mode, str(CA))
    assert settings(url="mysql://db1").address().tls == Tls()


@pytest.mark.parametrize(
    ("query", "mode"),
    [("", "verify-full"), ("?sslmode=prefer", "verify-full"), ("?sslmode=verify-ca", "verify-ca")],
)
def test_certificate_of_postgres_is_verified_alike(query: str, mode: str) -> None:
    assert verified_tls(f"postgresql://db1/shop{query}", CA) == {"sslrootcert": str(CA), "sslmode": mode}


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        ("clickhouse", "http://db1:8123"),
        ("redis", "redis://db1"),
        ("rabbitmq", "amqp://db1"),
        ("opensearch", "https://db1:9200, HTTP://db2:9200"),
    ],
)
def test_ca_of_a_connection_without_tls_is_refused(kind: str, url: str) -> None:
    with pytest.raises(ValidationError, match="ca is for TLS"):
        settings_of(kind).model_validate({"url": url, "ca": str(CA)})
    settings_of(kind).model_validate({"url": url})


def test_server_with_a_certificate_of_another_authority_is_refused(mysql_server: Server) -> None:
    [[folder]] = mysql_server.sql("SELECT @@datadir")
    url = f"{mysql_server.url('root')}?ssl_mode=verify_ca"
    own, other = Path(folder) / "ca.pem", Path(folder) / "client-cert.pem"
    assert not [finding for finding in MysqlSink(MysqlSettings(url=url, ca=own)).check() if finding.fatal]
    with open_session(LookupServer(url=url, ca=own).address()) as session:
        [cipher] = session.query("SHOW STATUS LIKE 'Ssl_cipher'")
        assert cipher["Value"]
    assert [finding.fatal for finding in MysqlSink(MysqlSettings(url=url, ca=other)).check()] == [True]
    with pytest.raises(TlsFailed):
        open_session(LookupServer(url=url, ca=other).address())
