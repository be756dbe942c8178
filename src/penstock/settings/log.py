# SPDX-License-Identifier: Apache-2.0
"""The settings of the kept logs: retention, and the deviations of single instances."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from penstock.limits import (
    COPIES_MAX,
    HOLD_AGE_SECONDS_DEFAULT,
    HOLD_BYTES_DEFAULT,
    HOLD_FREE_BYTES_DEFAULT,
    MIB,
)
from penstock.settings.values import Bytes, Seconds, Section

GIB = 1 << 30


class RetentionSettings(Section):
    """How much of a log to keep. The oldest segments are deleted as soon as one of the limits is exceeded."""

    age: Seconds | None = Field(
        default=86_400.0, description="delete segments older than this; null: no limit"
    )
    bytes: Bytes | None = Field(default=None, description="maximum bytes of all segments of an instance")
    free_bytes: Bytes | None = Field(
        default=None, description="delete the oldest segments while the disk has less than this free"
    )
    hold_bytes: Bytes | None = Field(
        default=HOLD_BYTES_DEFAULT,
        description="break a hold when the log after it exceeds this size; null: no limit",
    )
    hold_free_bytes: Bytes | None = Field(
        default=HOLD_FREE_BYTES_DEFAULT,
        description="break holds, oldest position first, while the disk has less than this free",
    )
    hold_age: Seconds | None = Field(
        default=float(HOLD_AGE_SECONDS_DEFAULT),
        description="how long a disconnected named consumer holds the log; null: consumers hold nothing",
    )


class LogSettings(Section):
    """How an instance's log is stored. `folder` holds one folder for each instance."""

    folder: Path = Path("penstock-log")
    segment_bytes: Bytes = Field(default=GIB, ge=MIB)
    block_bytes: Bytes = Field(default=64 * 1024, ge=4096, le=GIB)
    fsync: Literal["block", "seconds", "never"] = Field(
        default="seconds",
        description="when to fsync the log: after every write, every fsync_seconds, or never",
    )
    fsync_seconds: Seconds = Field(default=1.0, gt=0)
    memory_bytes: Bytes = Field(default=64 * MIB, ge=0)
    mode: Literal["memory", "file", "mixed"] = "mixed"
    copies: int = Field(
        default=1,
        ge=1,
        le=COPIES_MAX,
        description="how many members of the fleet have the log: the one that captures, and those that"
        " copy it",
    )
    serve: Literal["written", "durable"] = Field(
        default="written",
        description="when readers get a change: written: once it is written; durable: once as many members as"
        " copies have synced it, so that a take-over keeps what readers have seen. While a copy moves to"
        " another member, the new copy may still have to fetch a part of that from the server",
    )
    retention: RetentionSettings = Field(default_factory=RetentionSettings)
    cold_after: Seconds | None = Field(default=None, description="compress segments older than this")
    tier: str | None = Field(
        default=None, description="the URL of the object store to which compressed segments are moved"
    )
    free_bytes_min: Bytes = Field(
        default=256 * MIB, description="pause capture while the disk has less than this free"
    )

    def with_overrides(self, overrides: "LogOverrides") -> Self:
        """Return these settings with an instance's overrides."""
        changes = overrides.model_dump(exclude_unset=True)
        changes.update({name: getattr(overrides, name) for name in changes})
        if "retention" in changes:
            retention_overrides = (
                overrides.retention.model_dump(exclude_unset=True) if overrides.retention else {}
            )
            changes["retention"] = self.retention.model_copy(update=retention_overrides)
        return self.model_copy(update=changes)


class LogOverrides(Section):
    """The settings of `log` that one instance overrides."""

    folder: Path | None = None
    segment_bytes: Bytes = Field(default=GIB, ge=MIB)
    block_bytes: Bytes = Field(default=64 * 1024, ge=4096, le=GIB)
    fsync: Literal["block", "seconds", "never"] = "seconds"
    fsync_seconds: Seconds = Field(default=1.0, gt=0)
    memory_bytes: Bytes = Field(default=64 * MIB, ge=0)
    mode: Literal["memory", "file", "mixed"] = "mixed"
    copies: int = Field(default=1, ge=1, le=COPIES_MAX)
    serve: Literal["written", "durable"] = "written"
    retention: RetentionSettings | None = None
    cold_after: Seconds | None = None
    tier: str | None = None
    free_bytes_min: Bytes = 256 * MIB
