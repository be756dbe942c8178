# SPDX-License-Identifier: Apache-2.0
"""How a daemon reports on itself: the sections `metrics` and `telemetry` of `penstock.yaml`.

metrics: {tables: 200, alias: canal}
telemetry: {otlp: "http://collector:4318/v1/metrics", interval: 30s}
"""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from penstock.settings.values import Seconds, Section

_TABLES_MAX = 10_000


class MetricsSettings(Section):
    """Additional metrics that `GET /metrics` reports."""

    tables: int = Field(
        default=0,
        ge=0,
        le=_TABLES_MAX,
        description="count the changes of this many tables of each instance by table, of the rest as `other`",
    )
    alias: Literal["canal"] | None = Field(
        default=None, description="canal: repeat metrics under Canal's names, for its dashboards"
    )


class TelemetrySettings(Section):
    """Where the metrics are pushed to."""

    otlp: str | None = Field(
        default=None,
        description="the URL of an OpenTelemetry collector, http://host:4318/v1/metrics;"
        " needs pip install 'penstock[otlp]'",
        repr=False,
    )
    interval: Seconds = Field(default=60.0, ge=1, description="how often to push")

    @field_validator("otlp")
    @classmethod
    def _a_url(cls, url: str | None) -> str | None:
        if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
            raise ValueError("it must be the URL of a collector: http://host:4318/v1/metrics")
        return url
