# SPDX-License-Identifier: Apache-2.0
"""Large messages as files, with a reference in the topic."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock.errors import OptionInvalid, ServerBusy
from penstock.sinks.claim_check import ClaimCheck
from penstock.sinks.kafka.sink import KafkaSink, Settings


def test_reference_names_the_file_of_the_message(tmp_path: Path) -> None:
    claim_check = ClaimCheck(above="1KiB", path=str(tmp_path / "claims"))  # type: ignore[arg-type]
    reference = json.loads(claim_check.store("shop.t", b"x" * 2000))["claim_check"]
    assert Path(reference["path"]).read_bytes() == b"x" * 2000
    assert Path(reference["path"]) == tmp_path / "claims/shop.t" / reference["sha256"]
    assert reference["bytes"] == 2000


def test_message_that_is_stored_again_keeps_its_file(tmp_path: Path) -> None:
    claim_check = ClaimCheck(above=1024, path=str(tmp_path))
    references = {claim_check.store("t", b"x" * 2000) for _ in range(3)}
    assert len(references) == 1
    assert [path.name for path in (tmp_path / "t").iterdir()] == [
        json.loads(references.pop())["claim_check"]["sha256"]
    ]


def test_unfinished_file_of_a_crash_is_written_again(tmp_path: Path) -> None:
    claim_check = ClaimCheck(above=1024, path=str(tmp_path))
    path = Path(json.loads(claim_check.store("t", b"x" * 2000))["claim_check"]["path"])
    path.write_bytes(b"x")
    claim_check.store("t", b"x" * 2000)
    assert path.read_bytes() == b"x" * 2000


def test_url_of_a_file_system_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    reference = json.loads(ClaimCheck(above=1024, path=f"file://{tmp_path}").store("t", b"x" * 2000))
    assert reference["claim_check"]["path"].startswith(f"file://{tmp_path}/t/")


def test_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerBusy, match="cannot be written"):
        ClaimCheck(above=1024, path=str(tmp_path / "file")).store("t", b"x" * 2000)


def test_every_small_message_stays_in_the_topic() -> None:
    with pytest.raises(ValidationError, match="1024"):
        ClaimCheck(above=10, path="claims")


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/claims?region=eu-west-1",
        "s3://bucket/claims#1",
        "s3://AKIA:sesame-42@bucket/claims",
        "s3://AKIA:sesame/42@bucket/claims",
    ],
)
def test_url_with_credentials_or_a_query_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ValidationError, match="in the environment") as refused:
        ClaimCheck(above=1024, path=url)
    assert "AKIA" not in str(refused.value)


def test_local_folder_may_have_any_name(tmp_path: Path) -> None:
    claim_check = ClaimCheck(above=1024, path=str(tmp_path / "a@b?c#d"))
    references = [json.loads(claim_check.store("t", text * 2000)) for text in (b"x", b"y")]
    assert [Path(reference["claim_check"]["path"]).read_bytes()[:1] for reference in references] == [
        b"x",
        b"y",
    ]


def test_url_of_an_unknown_file_system_is_refused_before_the_first_message() -> None:
    claim_check = ClaimCheck(above=1024, path="nowhere://bucket/claims")
    with pytest.raises(OptionInvalid, match="nowhere://bucket"):
        KafkaSink(Settings(servers="127.0.0.1:1", claim_check=claim_check)).check()
