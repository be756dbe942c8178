# SPDX-License-Identifier: Apache-2.0
"""The metric of the listeners' certificate."""

from datetime import UTC, datetime
from pathlib import Path

from structlog.testing import capture_logs

from penstock.serve.certificate import read_certificate
from penstock.settings.listen import TlsFiles
from penstock.telemetry.readings import Readings
from tools.servers import certificate

NAME = "penstock_listener_certificate_expires_timestamp_seconds"


def test_expiry_of_the_certificate_file_is_reported(tmp_path: Path) -> None:
    certificate.make(tmp_path / "tls")
    names = certificate.server_options(tmp_path / "tls")
    files = TlsFiles(cert=Path(names["ssl-cert"]), key=Path(names["ssl-key"]))
    readings = Readings()
    read_certificate(readings, files)
    assert readings.values(NAME)[()] > datetime.now(UTC).timestamp()
    # A half-written new certificate is only reported.
    Path(names["ssl-cert"]).write_text("-----BEGIN CERTIFICATE-----\n")
    readings = Readings()
    with capture_logs() as logs:
        read_certificate(readings, files)
    assert (readings.present(), [line["event"] for line in logs]) == ([], ["the certificate cannot be read"])


def test_daemon_without_tls_has_no_such_metric() -> None:
    readings = Readings()
    read_certificate(readings, None)
    assert readings.present() == []
