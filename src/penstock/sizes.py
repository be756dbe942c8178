# SPDX-License-Identifier: Apache-2.0
"""Numbers of bytes as text for people."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(size: float) -> str:
    """Return a number of bytes with a suitable unit, such as 1.5 GiB."""
    unit = 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.{1 if unit else 0}f} {_UNITS[unit]}"
