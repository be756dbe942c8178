# SPDX-License-Identifier: Apache-2.0
"""Where the lines of the program's log go."""

import sys

import structlog

from penstock.telemetry.recent_events import RECENT_EVENTS


def log_to_stderr() -> None:
    """Send log lines to standard error, so that standard output has only results."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            RECENT_EVENTS.record,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            # The default prints the variables of every frame, which may contain a password.
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
