# SPDX-License-Identifier: Apache-2.0
"""Reports when the listeners' certificate expires."""

from pathlib import Path

import structlog
from cryptography import x509

from penstock.settings.listen import TlsFiles
from penstock.telemetry.readings import Readings

_log = structlog.get_logger(__name__)


def read_certificate(readings: Readings, files: TlsFiles | None) -> None:
    """Add a reading for the expiry time of the certificate file.

    If the file contains a chain, the first certificate is reported. A renewed certificate is reported as soon
    as its file is replaced, although the listeners use it only after a restart.
    """
    if files is None:
        return
    try:
        certificate = x509.load_pem_x509_certificate(Path(files.cert).read_bytes())
    except (OSError, ValueError) as problem:
        # The file cannot be read. The listeners continue with their current certificate.
        _log.warning("the certificate cannot be read", file=str(files.cert), why=str(problem))
        return
    expires = certificate.not_valid_after_utc.timestamp()
    readings.add("penstock_listener_certificate_expires_timestamp_seconds", expires)
