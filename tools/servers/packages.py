# SPDX-License-Identifier: Apache-2.0
"""The programs of a database server: found on this machine, or fetched and unpacked into a cache.

Flavors:

    mysql       MySQL 9 from Debian's unstable suite, unpacked in the cache
    mariadb     the MariaDB that this machine's own distribution offers, installed as the system's
    mariadb11   MariaDB 11.8 from Debian 13, unpacked in the cache
    host        whichever server this machine has, of either family; else as `mariadb`

Packages of a newer suite need a newer C library than the machine's. A private apt state with an empty dpkg
status makes apt resolve the whole closure, C library included; every package is unpacked without its
maintainer scripts, and programs run through that root's own dynamic loader. The machine's C library and
package database are therefore not changed, and no chroot is needed.

The mirror is the one that the machine's own apt sources name. The cache is `$PENSTOCK_SERVERS`, else
`~/.cache/penstock/servers`. A file lock lets one process install while others wait for it.
"""

import fcntl
import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tools.servers.errors import PartMissing

FLAVORS = ("mysql", "mariadb", "mariadb11")
COMMAND_SECONDS_MAX = 900
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

Family = Literal["mysql", "mariadb"]

# Each program by its MySQL and its MariaDB name. A flavor accepts both names.
PROGRAM_NAMES = (
    ("mysqld", "mariadbd"),
    ("mysql", "mariadb"),
    ("mysqlbinlog", "mariadb-binlog"),
    ("mysqldump", "mariadb-dump"),
    ("mysqladmin", "mariadb-admin"),
    ("mysql_tzinfo_to_sql", "mariadb-tzinfo-to-sql"),
)

# Dependencies whose programs are never run. Leaving them out halves the unpacked size.
UNUSED_PACKAGES = (
    "perl",
    "libperl",
    "systemd",
    "libsystemd-shared",
    "tzdata",
    "galera",
    "rsync",
    "socat",
    "init-system",
)


@dataclass(frozen=True)
class Suite:
    """The packages to fetch from one suite of the distribution's archive."""

    name: str
    family: Family
    packages: tuple[str, ...]


SUITES = {
    "mysql": Suite("sid", "mysql", ("mysql-server-core", "mysql-client-core")),
    "mariadb11": Suite(
        "trixie",
        "mariadb",
        (
            "mariadb-server-core",
            "mariadb-server",
            "mariadb-client-core",
            "mariadb-client",
            "mariadb-plugin-provider-lz4",
        ),
    ),
}


@dataclass(frozen=True)
class Installation:
    """A server's programs below a root directory; the root `/` is the machine itself."""

    flavor: str
    family: Family
    root: Path

    def argv(self, program: str) -> list[str]:
        """Return the command of a program, by its MySQL or its MariaDB name."""
        path = self._find(program)
        if self.root == Path("/"):
            return [str(path)]
        loader = self._first(
            "usr/lib64/ld-linux-*.so.*", "usr/lib/ld-linux-*.so.*", "usr/lib/*/ld-linux-*.so.*"
        )
        return [str(loader), "--library-path", self._library_path(), "--argv0", str(path), str(path)]

    @functools.cached_property
    def version(self) -> str:
        """The server's version, such as "9.7.4" or "10.11.19-MariaDB"."""
        argv = [*self.argv("mysqld"), "--no-defaults", "--version"]
        text = _run(argv, "cannot ask the server for its version")
        version_match = re.search(r"Ver (\S+)", text)
        if version_match is None:
            raise PartMissing(f"{argv[0]} --version prints no version: {text.strip()!r}")
        return version_match.group(1)

    def share(self) -> Path:
        """Return the directory of messages, character sets and system table scripts."""
        patterns = (f"usr/share/{folder}/charsets" for folder in ("mysql", "mariadb", "mysql-*"))
        return self._first(*patterns).parent

    def server_options(self) -> dict[str, str]:
        """Return the options for the locations of the server's own files."""
        share = self.share()
        options = {
            "basedir": str(self.root / "usr"),
            "lc-messages-dir": str(share),
            "character-sets-dir": str(share / "charsets"),
        }
        plugins = self._all("usr/lib/mysql/plugin", "usr/lib/*/mysql*/plugin", "usr/lib/*/libmariadb3/plugin")
        if plugins:
            options["plugin-dir"] = str(plugins[0])
        return options

    def _find(self, program: str) -> Path:
        names = next((pair for pair in PROGRAM_NAMES if program in pair), (program, program))
        preferred = names[self.family == "mariadb"]
        for name in (preferred, *names):
            if self.root == Path("/"):
                host_path = shutil.which(name, path=_program_path())
                if host_path:
                    return Path(host_path)
                continue
            for folder in ("usr/sbin", "usr/bin"):
                path = self.root / folder / name
                if os.access(path, os.X_OK):
                    return path
        raise PartMissing(f"the {self.flavor} installation in {self.root} has no program {preferred}")

    def _library_path(self) -> str:
        folders = self._all("usr/lib/*-linux-gnu*")
        paths = [*folders, *(folder / "mecab" for folder in folders)]
        return ":".join(map(str, [*paths, self.root / "usr/lib/mysql/private", self.root / "usr/lib"]))

    def _all(self, *patterns: str) -> list[Path]:
        return [path for pattern in patterns for path in sorted(self.root.glob(pattern))]

    def _first(self, *patterns: str) -> Path:
        paths = self._all(*patterns)
        if not paths:
            raise PartMissing(
                f"the {self.flavor} installation in {self.root} has none of {', '.join(patterns)}"
            )
        return paths[0]


def cache_directory() -> Path:
    """Return the directory of unpacked servers and data directory templates, created on first use."""
    named = os.environ.get("PENSTOCK_SERVERS")
    path = Path(named) if named else Path.home() / ".cache" / "penstock" / "servers"
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the cache's lock with the given name, across processes; the kernel drops it if the holder dies."""
    with open(cache_directory() / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def install(flavor: str) -> Installation:
    """Return the installation of a flavor. It is fetched first if this machine does not have it.

    Raises `PartMissing` if the flavor is unavailable on this machine, `ValueError` for an unknown flavor.
    """
    if flavor in SUITES:
        return _install_from_suite(flavor, SUITES[flavor])
    if flavor in ("mariadb", "host"):
        return _install_on_host(flavor)
    raise ValueError(f"unknown flavor {flavor!r}: one of {', '.join((*FLAVORS, 'host'))}")


def _install_on_host(flavor: str) -> Installation:
    with locked("host"):
        installation = _find_on_host(flavor)
        if installation is not None:
            return installation
        _install_package("mariadb-server", "no mariadbd is on PATH, /usr/sbin or /usr/libexec")
        installation = _find_on_host(flavor)
    if installation is None:
        raise PartMissing(
            "mariadb-server is installed, yet no mariadbd is on PATH, /usr/sbin or /usr/libexec"
        )
    return installation


def program_on_host(names: str, package: str) -> Path:
    """Return a program from a package of this machine's distribution, found by its name or by a pattern of
    paths.

    If the program is missing, the package is installed first. Raises `PartMissing` if it is unavailable on
    this machine.
    """
    with locked("host"):
        path = _find_program(names)
        if path is None:
            _install_package(package, f"there is no {names}")
            path = _find_program(names)
    if path is None:
        raise PartMissing(f"{package} is installed, yet there is no {names}")
    return path


def _find_program(names: str) -> Path | None:
    if names.startswith("/"):
        return next(iter(sorted(Path("/").glob(names[1:]), reverse=True)), None)
    path = shutil.which(names, path=_program_path())
    return None if path is None else Path(path)


def _install_package(package: str, missing: str) -> None:
    """Install a package of this machine's distribution. Raises `PartMissing` with what is missing."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise PartMissing(
            f"{missing}, and only root with apt-get may add one: as root, run `apt-get install {package}` or "
            "your distribution's counterpart"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    problem = f"cannot install the distribution's {package}"
    _run(["apt-get", "-q", "update"], problem, environment)
    _run(["apt-get", "-q", "-y", "install", package], problem, environment)


def _find_on_host(flavor: str) -> Installation | None:
    for name in ("mariadbd", "mysqld"):
        path = shutil.which(name, path=_program_path())
        if path is None:
            continue
        text = _run([path, "--no-defaults", "--version"], f"cannot ask {path} for its version")
        family: Family = "mariadb" if "mariadb" in text.lower() else "mysql"
        if flavor in ("host", family):
            return Installation(flavor, family, Path("/"))
    return None


def _program_path() -> str:
    return os.pathsep.join(
        [os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/libexec", "/usr/local/sbin"]
    )


def _install_from_suite(flavor: str, suite: Suite) -> Installation:
    root = cache_directory() / flavor
    installation = Installation(flavor, suite.family, root)
    with locked(flavor):
        if root.is_dir():
            return installation
        for program in ("apt-get", "dpkg-deb", "tar"):
            if shutil.which(program) is None:
                raise PartMissing(
                    f"{flavor} is unpacked from Debian packages, and this machine has no {program}"
                )
        state = cache_directory() / f"apt-{suite.name}"
        shutil.rmtree(state, ignore_errors=True)
        packages = _download(state, suite)
        part = root.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        _unpack(packages, part)
        part.rename(root)
        shutil.rmtree(state)
    return installation


def _download(state: Path, suite: Suite) -> list[Path]:
    """Fetch a suite's packages and all of their dependencies into a private apt state."""
    for folder in ("parts", "lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True)
    (state / "status").touch()
    lines = ["Types: deb", f"URIs: {mirror()}", f"Suites: {suite.name}", "Components: main"]
    if KEYRING.exists():
        lines.append(f"Signed-By: {KEYRING}")
    (state / "parts" / "suite.sources").write_text("\n".join(lines) + "\n")
    settings = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": state / "parts",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Debug::NoLocking": "true",
    }
    apt = ["apt-get", "-q", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    problem = (
        f"cannot fetch {' '.join(suite.packages)} from the suite {suite.name} of this machine's apt mirror"
    )
    _run([*apt, "update"], problem)
    _run([*apt, "-y", "--download-only", "install", *suite.packages], problem)
    return sorted((state / "cache" / "archives").glob("*.deb"))


def _unpack(packages: Sequence[Path], root: Path) -> None:
    """Unpack packages below a root, without running any of their scripts."""
    for folder in ("bin", "sbin", "lib", "lib64"):
        # Packages with /lib files need the merged /usr layout, so create it before they are unpacked.
        (root / "usr" / folder).mkdir(parents=True)
        (root / folder).symlink_to(f"usr/{folder}")
    for package in packages:
        if package.name.startswith(UNUSED_PACKAGES):
            continue
        reader = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
        writer = subprocess.run(
            ["tar", "-x", "-C", root, "--keep-directory-symlink", "--no-same-owner"],
            stdin=reader.stdout,
            check=False,
        )
        if reader.wait() != 0 or writer.returncode != 0:
            raise PartMissing(f"cannot unpack {package.name} into {root}: is the disk full?")


def mirror(etc: Path = Path("/etc/apt")) -> str:
    """Return the first mirror of the distribution's main archive among the machine's own apt sources.

    Both formats of sources.list(5) are read: first files with fields, then files with one line per source.
    Raises `PartMissing` if they name no mirror.
    """
    words: list[str] = []
    for path in sorted(etc.glob("sources.list.d/*.sources")):
        for line in path.read_text().splitlines():
            field, _, value = line.partition(":")
            if field.strip().lower() == "uris":
                words.extend(value.split())
    for path in (*sorted(etc.glob("sources.list")), *sorted(etc.glob("sources.list.d/*.list"))):
        for line in path.read_text().splitlines():
            if line.split()[:1] == ["deb"]:
                words.extend(line.split())
    for word in words:
        if "://" in word and word.rstrip("/").endswith("/debian"):
            return word
    raise PartMissing(
        f"no Debian mirror among this machine's apt sources ({etc}): add one, or use flavor mariadb"
    )


def _run(argv: Sequence[str], problem: str, environment: dict[str, str] | None = None) -> str:
    started = time.monotonic()
    try:
        done = subprocess.run(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=COMMAND_SECONDS_MAX, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise PartMissing(f"{problem}: {argv[0]} ran for {time.monotonic() - started:.0f} s") from error
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise PartMissing(f"{problem}: {argv[0]} ended with {done.returncode}:\n{tail}")
    return done.stdout
