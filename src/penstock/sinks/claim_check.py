# SPDX-License-Identifier: Apache-2.0
"""Stores messages that are too large for the brokers as files, and sends a reference in their place (claim
check).
"""

import hashlib
import json
import os
from pathlib import Path

import pyarrow
from pyarrow import fs
from pydantic import Field, field_validator

from penstock.errors import AccessDenied, OptionInvalid, PenstockError, ServerBusy
from penstock.settings.values import Bytes, Section


class ClaimCheck(Section):
    """Where large messages are stored. Penstock never deletes their files."""

    above: Bytes = Field(ge=1024, description="store messages of more bytes than this as files")
    path: str = Field(
        min_length=1, description="a folder, or a URL that pyarrow supports: s3://, gs://, hdfs://"
    )

    @field_validator("path")
    @classmethod
    def _url_of_a_folder(cls, value: str) -> str:
        """Refuse credentials, which would be visible in references, and a query, which would be appended to
        every file's path.
        """
        if "://" in value and set("@?#") & set(value):
            raise ValueError(
                "the URL has one of the characters @ ? #: give a folder alone, and credentials, region and"
                " endpoint in the environment: AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL"
            )
        return value

    def check(self) -> None:
        """Raise OptionInvalid if the URL's file system is unknown, ServerBusy if it does not answer."""
        if "://" not in self.path:
            return
        try:
            fs.FileSystem.from_uri(self.path)
        except (OSError, ValueError, pyarrow.ArrowNotImplementedError) as problem:
            raise _error_of(self.path, problem) from problem

    def store(self, folder: str, value: bytes) -> bytes:
        """Store a message, and return the reference that takes its place.

        A file is named by the hash of its content, so storing a message again changes nothing. A local file
        is synced before this returns. Raises AccessDenied, OptionInvalid, ServerBusy.
        """
        digest = hashlib.sha256(value).hexdigest()
        path = f"{self.path.rstrip('/')}/{folder}/{digest}"
        try:
            if "://" in self.path:
                filesystem, name = fs.FileSystem.from_uri(path)
                with filesystem.open_output_stream(name) as stream:
                    stream.write(value)
            else:
                path = os.path.abspath(path)
                _write_synced(Path(path), value)
        except (OSError, ValueError, pyarrow.ArrowNotImplementedError) as problem:
            raise _error_of(path, problem) from problem
        return json.dumps({"claim_check": {"path": path, "bytes": len(value), "sha256": digest}}).encode()


def _write_synced(path: Path, value: bytes) -> None:
    if path.exists() and path.stat().st_size == len(value):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Use a unique name, because writers of different parts may store the same message at the same time.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{id(value)}")
    with unfinished.open("wb") as file:
        file.write(value)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _error_of(path: str, problem: Exception) -> PenstockError:
    message = f"the claim check {path} cannot be written: {problem}"
    hint = "Check claim_check.path of the sink"
    if isinstance(problem, PermissionError):
        return AccessDenied(message, hint=hint)
    if not isinstance(problem, OSError):
        return OptionInvalid(message, hint=hint)
    return ServerBusy(message, hint=f"{hint}, and the space there")
