# SPDX-License-Identifier: Apache-2.0
"""The `ticdc:` block of an instance whose source is the output of TiCDC: a folder, an object store, or Kafka.

shop:
  source: ticdc+s3://bucket/shop
  ticdc: {time_zone: Asia/Shanghai}
"""

import re
from typing import Literal, Self
from zoneinfo import ZoneInfo

from pydantic import Field, field_validator, model_validator

from penstock.settings.kafka import KafkaAccount
from penstock.settings.values import Seconds, Section

SCHEME = "ticdc+"

_URL = re.compile(r"ticdc\+[a-z][a-z0-9]*://\S+")
_KAFKA_URL = re.compile(r"ticdc\+kafka://([^\s/@?]+)/([A-Za-z0-9._,-]+)")


def is_ticdc_url(text: str) -> bool:
    """Return whether a source is the output of TiCDC."""
    return text.strip().startswith(SCHEME)


def check_ticdc_url(text: str) -> str:
    """Return the URL unchanged. Raises ValueError."""
    if is_ticdc_kafka(text):
        kafka_source(text)
    elif not _URL.fullmatch(text.strip()):
        raise ValueError("write the root of a storage sink: ticdc+file:///folder or ticdc+s3://bucket/prefix")
    return text


def is_ticdc_kafka(text: str) -> bool:
    """Return whether a source consists of Kafka topics that TiCDC writes to."""
    return text.strip().startswith(f"{SCHEME}kafka:")


def kafka_source(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the brokers and the topics of a source. Raises ValueError."""
    match = _KAFKA_URL.fullmatch(text.strip())
    if match is None or not all(topics := tuple(match[2].split(","))):
        raise ValueError("write ticdc+kafka://broker1:9092,broker2:9092/topic; the account is ticdc.kafka")
    return match[1], topics


class CsvSettings(Section):
    """How the changefeed writes CSV.

    Repeat the changefeed's `csv` settings here if they differ from the defaults. The changefeed must set
    include-commit-ts and output-old-value.
    """

    delimiter: str = Field(default=",", min_length=1, max_length=1)
    quote: str = Field(default='"', min_length=1, max_length=1)
    null: str = Field(default="\\N", min_length=1)
    output_handle_key: bool = False
    binary: Literal["base64", "hex"] = Field(default="base64", description="binary-encoding-method")

    @model_validator(mode="after")
    def _are_different(self) -> Self:
        if self.delimiter == self.quote:
            raise ValueError("delimiter and quote are the same")
        return self


class TicdcSettings(Section):
    """How to read the output of TiCDC."""

    time_zone: str | None = Field(
        default=None,
        description="--tz of cdc server, in which it writes TIMESTAMP; without it such columns are refused",
    )
    poll: Seconds = Field(default=2.0, gt=0, description="how often to look for a later checkpoint")
    virtual_columns: tuple[str, ...] = Field(
        default=(),
        description="virtual generated columns, which TiCDC does not write, as database.table.column",
    )
    csv: CsvSettings = Field(default_factory=CsvSettings)
    kafka: KafkaAccount = Field(
        default_factory=KafkaAccount, description="the account of the brokers, for ticdc+kafka://"
    )

    @field_validator("time_zone")
    @classmethod
    def _is_known(cls, name: str | None) -> str | None:
        if name is not None:
            try:
                ZoneInfo(name)
            except (KeyError, ValueError, OSError) as problem:
                raise ValueError(f"{name} is no time zone; write UTC or Asia/Shanghai") from problem
        return name

    @field_validator("virtual_columns")
    @classmethod
    def _have_three_names(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        for column in columns:
            if column.count(".") < 2 or not all(column.split(".")):
                raise ValueError(f"{column!r}: write database.table.column")
        return columns

    @property
    def zone(self) -> ZoneInfo | None:
        """The time zone of TIMESTAMP values."""
        return None if self.time_zone is None else ZoneInfo(self.time_zone)
