# SPDX-License-Identifier: Apache-2.0
"""Samples written by earlier versions are never edited: each folder keeps its original bytes."""

import hashlib
from pathlib import Path

import pytest

from tests.samples.reading import VERSIONS
from tests.samples.write import SAMPLES

# For each version, the SHA-256 of the paths and contents of all its files, in path order. Add a line for a
# new version. If the digest of an old version differs, restore its folder: the current code must be able to
# read the files of that version.
DIGESTS = {
    "0.1": "425caf715065536ddb483b45f59571c4928625cedc14dfd9a25065362245e53b",
}


def digest_of(folder: Path) -> str:
    """Return one digest of all files below a folder."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{hashlib.sha256(files[name].read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def test_every_version_has_a_digest() -> None:
    assert list(DIGESTS) == VERSIONS


@pytest.mark.parametrize("version", DIGESTS)
def test_samples_of_a_version_are_unchanged(version: str) -> None:
    assert digest_of(SAMPLES / version) == DIGESTS[version]


def test_any_edit_changes_the_digest(tmp_path: Path) -> None:
    digests = [digest_of(tmp_path)]
    for name, text in (("a", ""), ("a", "1"), ("b", "1")):
        (tmp_path / name).write_text(text)
        digests.append(digest_of(tmp_path))
    (tmp_path / "a").rename(tmp_path / "c")
    digests.append(digest_of(tmp_path))
    assert len(set(digests)) == 5
