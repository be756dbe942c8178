# SPDX-License-Identifier: Apache-2.0
"""The text of a TIME."""

from datetime import timedelta


def duration_text(duration: timedelta) -> str:
    """Return [-]hh:mm:ss[.ffffff], as the server writes a TIME."""
    micros = duration // timedelta(microseconds=1)
    seconds, fraction = divmod(abs(micros), 1_000_000)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return ("-" if micros < 0 else "") + text + (f".{fraction:06d}" if fraction else "")
