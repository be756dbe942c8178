# SPDX-License-Identifier: Apache-2.0
"""The settings of Debezium messages in Kafka: their format, and the topics for messages that do not carry
rows.
"""

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from penstock.settings.values import Seconds, Section
from penstock.sinks.messages import DebeziumForms

TopicName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,249}$")]


class Heartbeat(Section):
    """A topic that gets a message in each interval while the pipeline runs."""

    topic: TopicName = Field(description="the topic; Debezium's is __debezium-heartbeat.<topic.prefix>")
    server: str = Field(description="`serverName` in the key, the connector's topic.prefix")
    interval: Seconds = Field(default=10.0, ge=0.1, description="the time between two messages")


class DebeziumSettings(DebeziumForms):
    """The formats of Debezium messages, and the additional messages that a Debezium connector can be
    configured to write.
    """

    truncates: bool = Field(
        default=False,
        description="whether a TRUNCATE becomes a message with the operation t, without a key",
    )
    schema_topic: TopicName | None = Field(
        default=None, description="the topic of statements (DDL); the connector's is its topic.prefix"
    )
    transaction_topic: TopicName | None = Field(
        default=None,
        description="the topic of BEGIN and END of each transaction; messages then have a transaction block",
    )
    heartbeat: Heartbeat | None = Field(
        default=None, description="a topic that gets a message in each interval"
    )

    @model_validator(mode="after")
    def _envelopes_of_truncates(self) -> "DebeziumSettings":
        if self.flat and self.truncates:
            raise ValueError("truncates: flat rows have no form for them")
        return self

    @property
    def needs_one_writer(self) -> bool:
        """Whether messages depend on all changes of a transaction, or on the order of changes and
        statements.
        """
        return self.writes_statements or self.transaction_topic is not None

    @property
    def writes_statements(self) -> bool:
        """Whether any statement becomes a message."""
        return self.truncates or self.schema_topic is not None
