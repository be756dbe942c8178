# SPDX-License-Identifier: Apache-2.0
"""Conversion between durations and the text of a TIME."""

import re
from datetime import timedelta

_TIME = re.compile(r"(-?)(\d{1,3}):(\d{2})(?::(\d{2})(?:\.(\d{1,6}))?)?")


def duration_text(duration: timedelta) -> str:
    """Return the duration as [-]hh:mm:ss[.ffffff], as the server writes a TIME."""
    micros = duration // timedelta(microseconds=1)
    seconds, fraction = divmod(abs(micros), 1_000_000)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return ("-" if micros < 0 else "") + text + (f".{fraction:06d}" if fraction else "")


def duration_of(text: str) -> timedelta | None:
    """Parse a duration of the form [-]hh:mm[:ss[.ffffff]]; return None for any other text."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    sign, hours, minutes, seconds, fraction = match.groups()
    duration = timedelta(
        hours=int(hours),
        minutes=int(minutes),
        seconds=int(seconds or 0),
        microseconds=int((fraction or "0").ljust(6, "0")),
    )
    return -duration if sign else duration
