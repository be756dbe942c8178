# SPDX-License-Identifier: Apache-2.0
"""Freed buffers go back to the system."""

import ctypes
import os
import platform
import subprocess
import sys

import pytest

from penstock.engine import allocator

# After a large buffer has been freed, glibc allocates further large buffers on the heap. A small value above
# them then prevents the heap from shrinking.
KEPT = """
import sys
from penstock.engine.allocator import return_large_buffers
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
if sys.argv[1] == "returned":
    assert return_large_buffers()
large = bytearray(31 << 20)
del large
before = resident()
buffers = [bytearray(8 << 20) for _ in range(12)]
pins = [bytearray(50_000) for _ in range(4)]
buffers.clear()
print((resident() - before) >> 20)
"""

# Small buffers come from heaps, which a buffer at their end keeps from shrinking.
UNUSED = """
import sys
import pyarrow
from penstock.engine.allocator import return_unused_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
if sys.argv[1] == "arrow":
    buffers = [pyarrow.allocate_buffer(50_000) for _ in range(2000)]
    for buffer in buffers:
        memoryview(buffer).cast("B")[:] = bytes(50_000)
else:
    buffers = [bytearray(50_000) for _ in range(2000)]
pin = buffers[-1]
buffer = None
del buffers
freed = resident()
return_unused_memory()
print((freed - before) >> 20, (resident() - before) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such threshold")
def test_freed_buffers_leave_the_process() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}

    def kept_mib(how: str, **further: str) -> int:
        child = [sys.executable, "-c", KEPT, how]
        return int(subprocess.check_output(child, text=True, env=environment | further))

    assert kept_mib("returned") < 8
    assert kept_mib("kept") > 80, "else the setting is needless"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries cannot trim their heaps")
@pytest.mark.parametrize("kind", ["arrow", "python"])
def test_unused_memory_leaves_the_process(kind: str) -> None:
    child = [sys.executable, "-c", UNUSED, kind]
    freed_mib, returned_mib = map(int, subprocess.check_output(child, text=True).split())
    assert returned_mib < 10
    assert freed_mib > 80, "else the call is needless"


def test_threshold_of_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4194304")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("the allocator is left alone"))
    assert not allocator.return_large_buffers.__wrapped__()


def test_c_library_without_the_setting_is_tolerated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not allocator.return_large_buffers.__wrapped__()
