# SPDX-License-Identifier: Apache-2.0
"""When a daemon reports a problem by itself, and to whom: the section `alerts` of `penstock.yaml`.

alerts:
  webhook: https://hooks.slack.com/services/...
  format: slack
  lag: 10m
"""

import json
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from penstock.settings.values import Bytes, Seconds, SecretEnv, SecretText, Section

GIB = 1 << 30
AFTER_SECONDS_DEFAULT = 60.0
PORTS = {"smtp": 587, "smtps": 465}

# The body of each format. {text} stands for the message as a JSON string, quotes included.
FORMATS = {
    "slack": '{"text": {text}}',
    "dingtalk": '{"msgtype": "text", "text": {"content": {text}}}',
    "wecom": '{"msgtype": "text", "text": {"content": {text}}}',
    "feishu": '{"msg_type": "text", "content": {"text": {text}}}',
}


class MailSettings(Section):
    """A mail server, and the recipients of the mail."""

    server: str = Field(description="smtp://host:587, which upgrades to TLS, or smtps://host:465")
    sender: str = Field(description="the address in From")
    to: tuple[str, ...] = Field(min_length=1, description="the addresses in To")
    user: str | None = None
    password: SecretText | None = None
    password_file: Path | None = None
    password_env: SecretEnv = Field(default=None, validate_default=True)

    @field_validator("server")
    @classmethod
    def _a_server(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in PORTS or not parts.hostname:
            raise ValueError("write smtp://host:587 or smtps://host:465")
        return url

    @field_validator("sender", "to")
    @classmethod
    def _one_line(cls, addresses: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for address in [addresses] if isinstance(addresses, str) else addresses:
            if "@" not in address or not address.isprintable():
                raise ValueError(f"{address!r} is no address")
        return addresses


class AlertSettings(Section):
    """Where alerts are sent, by webhook or by mail, and for which conditions. An alert is sent when its
    condition begins and when it ends.
    """

    # The path of a webhook is its credential.
    webhook: SecretText | None = Field(default=None, description="the URL to which alerts are posted")
    format: Literal["slack", "dingtalk", "wecom", "feishu", "json"] = Field(
        default="json", description="the body for a webhook; json has the fields of the alert"
    )
    body: str | None = Field(
        default=None, description="a body of your own instead, as JSON text in which {text} is the message"
    )
    mail: MailSettings | None = None
    pipelines: tuple[str, ...] = Field(
        default=(),
        description="pipeline files, or state stores of pipelines, to watch; default: console.pipelines",
        # The URL of a state store may contain a password.
        repr=False,
    )
    after: Seconds = Field(
        default=AFTER_SECONDS_DEFAULT,
        description="alert if a capture has not been running, or a pipeline has been retrying, for this long",
    )
    lag: Seconds | None = Field(
        default=600.0, description="alert if a capture lags by more than this; null: never"
    )
    disk: Bytes | None = Field(
        default=10 * GIB, description="alert if a log's disk has fewer free bytes; null: never"
    )
    kept: float | None = Field(
        default=0.25,
        gt=0,
        lt=1,
        description="alert if less than this part of the server's log is before the position of a lagging"
        " capture, because the server may soon purge that position; null: never",
    )

    @field_validator("webhook")
    @classmethod
    def _a_url(cls, url: SecretText | None) -> SecretText | None:
        if url is not None:
            parts = urlsplit(url.reveal())
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("it must be a URL: https://host/path")
        return url

    @field_validator("body")
    @classmethod
    def _a_template(cls, body: str | None) -> str | None:
        if body is not None:
            if "{text}" not in body:
                raise ValueError("write {text} where the message belongs")
            try:
                json.loads(body.replace("{text}", '""'))
            except ValueError as problem:
                raise ValueError(f"it is no JSON with {{text}} as a value: {problem}") from problem
        return body

    @model_validator(mode="after")
    def _has_one_channel(self) -> Self:
        if (self.webhook is None) == (self.mail is None):
            raise ValueError("set webhook or mail, one of them")
        return self
