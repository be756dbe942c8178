# SPDX-License-Identifier: Apache-2.0
"""Checks the macOS wheel, built on Linux, as far as possible without a Mac."""

import struct
import zipfile
from pathlib import Path

from tools.package.built import LIBRARY, PackageInvalid

# Mach-O's <mach-o/loader.h>: a header of eight numbers, then commands that begin with kind and size.
_HEADER = struct.Struct("<8I")
_MAGIC, _ARM64 = 0xFEEDFACF, 0x0100000C
_LOAD_DYLIB, _CODE_SIGNATURE = 0x0C, 0x1D
_SYSTEM = ("/usr/lib/", "/System/Library/")


def check_library(wheel: Path) -> str:
    """Return a description of the wheel's library. Raises PackageInvalid if no Mac could load it."""
    library = zipfile.ZipFile(wheel).read(LIBRARY)
    magic, processor, _, _, count, *_ = _HEADER.unpack_from(library)
    if (magic, processor) != (_MAGIC, _ARM64):
        raise PackageInvalid(f"{LIBRARY} of {wheel.name} is no library for arm64 and macOS")
    needed, is_signed, offset = [], False, _HEADER.size
    for _ in range(count):
        kind, size = struct.unpack_from("<2I", library, offset)
        if kind == _LOAD_DYLIB:
            (name_offset,) = struct.unpack_from("<I", library, offset + 8)
            needed.append(library[offset + name_offset : offset + size].rstrip(b"\0").decode())
        is_signed |= kind == _CODE_SIGNATURE
        offset += size
    foreign = [name for name in needed if not name.startswith(_SYSTEM)]
    if foreign:
        raise PackageInvalid(
            f"{LIBRARY} of {wheel.name} needs {', '.join(foreign)}, which no Mac has by itself"
        )
    if not is_signed:
        raise PackageInvalid(
            f"{LIBRARY} of {wheel.name} is not signed, and macOS on ARM loads no such library"
        )
    return (
        f"not run, because this is no Mac; a signed library for arm64 that needs {len(needed)} of the system"
    )
