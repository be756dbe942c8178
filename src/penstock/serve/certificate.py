# SPDX-License-Identifier: Apache-2.0
"""When the certificate of the listeners expires."""

from pathlib import Path

import structlog
from cryptography import x509

from penstock.settings.listen import TlsFiles
from penstock.telemetry.readings import Readings

_log = structlog.get_logger(__name__)


def read_certificate(readings: Readings, files: TlsFiles | None) -> None:
    """Add when the certificate file expires, which is the first certificate of a chain.

    A file that was renewed counts from its renewal on, although the listeners use it after a restart only.
    """
    if files is None:
        return
    try:
        certificate = x509.load_pem_x509_certificate(Path(files.cert).read_bytes())
    except (OSError, ValueError) as problem:
        # The listeners go on with the certificate that they have.
        _log.warning("the certificate cannot be read", file=str(files.cert), why=str(problem))
        return
    expires = certificate.not_valid_after_utc.timestamp()
    readings.add("penstock_listener_certificate_expires_timestamp_seconds", expires)
