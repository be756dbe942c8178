# SPDX-License-Identifier: Apache-2.0
"""`make package` refuses a wheel that lacks a part or that supports too few systems."""

import platform
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools.package.built import _IN_WHEEL, _VENDOR, LIBRARY, TARGETS, PackageInvalid, check_contents
from tools.package.macos import check_library

LINUX = TARGETS["linux-aarch64"]


VENDOR = Path(__file__).parents[2] / "src" / _VENDOR
LINUX_WHEEL = "penstock-0.1.0-cp311-abi3-manylinux_2_17_aarch64.whl"


def vendored() -> dict[str, bytes]:
    """Return the vendored files of the console by name."""
    return {path.name: path.read_bytes() for path in VENDOR.iterdir()}


def wheel_in(
    folder: Path,
    name: str,
    files: tuple[str, ...] = _IN_WHEEL,
    vendor: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a wheel with the vendored files of the console, and otherwise with empty files."""
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.writestr(file, "")
        for file, content in (vendored() if vendor is None else vendor).items():
            archive.writestr(f"{_VENDOR}/{file}", content)
    return path


def test_whole_wheel_is_accepted(tmp_path: Path) -> None:
    check_contents(wheel_in(tmp_path, "penstock-0.1.0-cp311-abi3-manylinux_2_17_aarch64.whl"), LINUX)


def test_wheel_without_the_sample_is_refused(tmp_path: Path) -> None:
    name = "penstock-0.1.0-cp311-abi3-manylinux_2_17_aarch64.whl"
    wheel = wheel_in(tmp_path, name, tuple(file for file in _IN_WHEEL if "rows.json.gz" not in file))
    with pytest.raises(PackageInvalid, match=r"lacks penstock/sample/rows\.json\.gz"):
        check_contents(wheel, LINUX)


def test_wheel_with_another_vendored_file_is_refused(tmp_path: Path) -> None:
    changed = vendored() | {"htmx.min.js": b"alert(1)"}
    with pytest.raises(PackageInvalid, match=r"htmx\.min\.js .* is not as published"):
        check_contents(wheel_in(tmp_path, LINUX_WHEEL, vendor=changed), LINUX)
    added = vendored() | {"more.js": b""}
    with pytest.raises(PackageInvalid, match=r"differ in more\.js"):
        check_contents(wheel_in(tmp_path, LINUX_WHEEL, vendor=added), LINUX)


@pytest.mark.parametrize("file", sorted(vendored()))
def test_wheel_without_a_vendored_file_or_its_license_is_refused(tmp_path: Path, file: str) -> None:
    left = {name: content for name, content in vendored().items() if name != file}
    with pytest.raises(PackageInvalid, match=file.replace(".", r"\.")):
        check_contents(wheel_in(tmp_path, LINUX_WHEEL, vendor=left), LINUX)


@pytest.mark.parametrize(
    "name",
    [
        "penstock-0.1.0-cp312-cp312-manylinux_2_17_aarch64.whl",
        "penstock-0.1.0-cp311-abi3-manylinux_2_34_aarch64.whl",
        "penstock-0.1.0-cp311-abi3-manylinux_2_17_x86_64.whl",
    ],
)
def test_wheel_for_other_systems_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PackageInvalid, match="is not for every Python"):
        check_contents(wheel_in(tmp_path, name), LINUX)


def test_macos_wheel_never_runs_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert not TARGETS["macos-arm64"].runs_here


ARM64, X86_64 = 0x0100000C, 0x01000007
SIGNATURE = struct.pack("<4I", 0x1D, 16, 0, 0)


def mac_wheel(folder: Path, processor: int, commands: list[bytes]) -> Path:
    """Write a wheel whose library has a Mach-O header and load commands, and nothing else."""
    path = folder / "penstock-0.1.0-cp311-abi3-macosx_11_0_arm64.whl"
    header = struct.pack("<8I", 0xFEEDFACF, processor, 0, 6, len(commands), sum(map(len, commands)), 0, 0)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(LIBRARY, header + b"".join(commands))
    return path


def loads(library: str) -> bytes:
    """Return the load command for a library that another library needs."""
    name = library.encode() + bytes(8 - len(library) % 8)
    return struct.pack("<6I", 0x0C, 24 + len(name), 24, 0, 0, 0) + name


def test_signed_macos_library_of_system_libraries_is_accepted(tmp_path: Path) -> None:
    wheel = mac_wheel(tmp_path, ARM64, [loads("/usr/lib/libSystem.B.dylib"), SIGNATURE])
    assert "needs 1 of the system" in check_library(wheel)


@pytest.mark.parametrize(
    ("processor", "commands", "why"),
    [
        (X86_64, [loads("/usr/lib/libSystem.B.dylib"), SIGNATURE], "no library for arm64"),
        (ARM64, [loads("/usr/lib/libSystem.B.dylib")], "is not signed"),
        (
            ARM64,
            [loads("/opt/homebrew/lib/libzstd.1.dylib"), SIGNATURE],
            r"needs /opt/homebrew/lib/libzstd\.1",
        ),
    ],
)
def test_macos_library_that_no_mac_loads_is_refused(
    tmp_path: Path, processor: int, commands: list[bytes], why: str
) -> None:
    with pytest.raises(PackageInvalid, match=why):
        check_library(mac_wheel(tmp_path, processor, commands))
