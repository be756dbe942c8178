# SPDX-License-Identifier: Apache-2.0
"""The folder that a migration writes: settings, pipelines, secrets, checkpoints, and the report.

The whole folder is written beside its final place, read back by the product's own readers, and then renamed.
A folder that cannot be read is never left behind, and an existing folder is never changed.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.store import open_store
from penstock.coordinate.subscription_record import Subscription, Subscriptions
from penstock.errors import OptionInvalid
from penstock.migrate.report import Report
from penstock.migrate.report_text import report_text
from penstock.model import Secret
from penstock.pipeline.settings import load_pipeline
from penstock.settings.daemon import load_settings
from penstock.settings.file import yaml_text

SecretsIn = Literal["file", "env"]

DAEMON_FILE = "penstock.yaml"
REPORT_FILE = "migration.md"
_SECRETS_FOLDER = "secrets"


@dataclass(frozen=True)
class FolderPath:
    """A path below the output folder, in a setting."""

    path: str


@dataclass(frozen=True)
class Variable:
    """A reference to an environment variable, in a setting."""

    name: str


@dataclass(frozen=True)
class Cursor:
    """The checkpoint of a consumer, for the daemon's coordination store. `filter` is the filter of a Canal
    client.
    """

    instance: str
    name: str
    checkpoint: Checkpoint
    filter: str = ""


@dataclass
class Migration:
    """The settings that a migration creates from an original system.

    `daemon` is the content of penstock.yaml, None if no daemon is needed. `pipelines` contains pipeline files
    by name. Text in the settings is literal: a `$` does not begin a variable, except in `Variable`.
    """

    original: str
    secrets_in: SecretsIn = "file"
    report: Report = field(default_factory=Report)
    daemon: dict[str, Any] | None = None
    pipelines: dict[str, dict[str, Any]] = field(default_factory=dict)
    cursors: list[Cursor] = field(default_factory=list)
    _secrets: dict[str, Secret] = field(default_factory=dict, repr=False)

    def secret(self, setting: str, name: str, value: str) -> dict[str, Any]:
        """Keep a secret outside the settings, and return the setting that refers to it; {} if the secret is
        empty.

        `setting` is the name of the setting without `_file`, `name` the name of the file or variable.
        Raises OptionInvalid if another secret has the name already.
        """
        if not value:
            return {}
        in_variable = self.secrets_in == "env"
        if in_variable:
            name = "".join(letter if letter.isalnum() else "_" for letter in name).upper()
        if self._secrets.setdefault(name, Secret(value)).reveal() != value:
            raise OptionInvalid(
                f"two different secrets of the original would both be named {name}",
                hint="Rename one of the instances, data sources or targets that have them, and migrate again",
            )
        if in_variable:
            return {setting: Variable(name)}
        return {f"{setting}_file": FolderPath(f"{_SECRETS_FOLDER}/{name}")}

    @property
    def variables(self) -> list[str]:
        """The environment variables that the settings refer to."""
        return sorted(self._secrets) if self.secrets_in == "env" else []

    def write(self, folder: Path, *, dry_run: bool = False) -> list[str]:
        """Write the folder, and return the names of its files. With `dry_run` only check it.

        Raises OptionInvalid if the folder exists, or if the settings are refused.
        """
        folder = folder.absolute()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OptionInvalid(
                f"{folder} exists and is not empty", hint="Name a new folder with --output, or remove it"
            )
        parent = next(path for path in folder.parents if path.is_dir())
        try:
            staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=None if dry_run else parent))
        except OSError as problem:
            raise OptionInvalid(
                f"{folder} cannot be made: {problem}", hint="Choose another --output"
            ) from problem
        try:
            self._write_documents(staging, staging)
            self._check(staging)
            if dry_run:
                return sorted(self._documents())
            # The documents were checked with paths of the temporary folder. Write them again with paths of
            # the final folder.
            self._write_documents(staging, folder)
            self._write_cursors(staging)
            (staging / REPORT_FILE).write_text(report_text(self.original, self.report), encoding="utf-8")
            folder.parent.mkdir(parents=True, exist_ok=True)
            os.rename(staging, folder)
        except OSError as problem:
            raise OptionInvalid(
                f"{folder} cannot be written: {problem}", hint="Choose another --output"
            ) from problem
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return sorted([*self._documents(), REPORT_FILE])

    def _documents(self) -> dict[str, dict[str, Any]]:
        return self.pipelines | ({} if self.daemon is None else {DAEMON_FILE: self.daemon})

    def _write_documents(self, staging: Path, final: Path) -> None:
        for name, document in self._documents().items():
            header = f"# Written by penstock migrate {self.original}; {REPORT_FILE} says what was carried.\n"
            (staging / name).write_text(header + yaml_text(_plain(document, final)), encoding="utf-8")
        if self.secrets_in == "file" and self._secrets:
            (staging / _SECRETS_FOLDER).mkdir(mode=0o700, exist_ok=True)
            for name, secret in self._secrets.items():
                path = staging / _SECRETS_FOLDER / name
                path.touch(mode=0o600)
                path.write_text(secret.reveal(), encoding="utf-8")

    def _check(self, staging: Path) -> None:
        """Read every file as the product does. Raises OptionInvalid."""
        environment: Mapping[str, str] = dict(os.environ)
        if self.secrets_in == "env":
            environment = {**environment, **{name: secret.reveal() for name, secret in self._secrets.items()}}
        if self.daemon is not None:
            load_settings(staging / DAEMON_FILE, environment)
        for name in self.pipelines:
            load_pipeline(staging / name, environment)

    def _write_cursors(self, staging: Path) -> None:
        if not self.cursors:
            return
        (staging / "log").mkdir(exist_ok=True)
        with closing(open_store(f"sqlite://{staging / 'log' / 'coordination.db'}")) as store:
            registry = Subscriptions(store)
            for cursor in self.cursors:
                created = registry.create(Subscription(cursor.instance, cursor.name))
                registry.reset(created.instance, created.name, cursor.checkpoint)
                if cursor.filter:
                    store.put(f"{created.path}/filter", cursor.filter.encode())


def _plain(value: Any, folder: Path) -> Any:
    """Return a setting as plain values. A `$` in literal text is escaped, so that it does not refer to a
    variable.
    """
    if isinstance(value, dict):
        return {key: _plain(inner, folder) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, folder) for inner in value]
    if isinstance(value, FolderPath):
        return str(folder / value.path).replace("$", "$$")
    if isinstance(value, Variable):
        return f"${{{value.name}}}"
    return value.replace("$", "$$") if isinstance(value, str) else value
