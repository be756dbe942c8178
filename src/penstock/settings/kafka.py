# SPDX-License-Identifier: Apache-2.0
"""The account of a Kafka cluster."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from penstock.model import Secret
from penstock.settings.values import SecretEnv, SecretText, Section, one_secret


class KafkaAccount(Section):
    """An account of a Kafka cluster, and how connections to the cluster are secured."""

    user: str | None = Field(default=None, description="the account (SASL)")
    password: SecretText | None = None
    password_file: Path | None = Field(default=None, description="a file with the password")
    password_env: SecretEnv = Field(default=None, description="an environment variable with the password")
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        default="SCRAM-SHA-512", description="the SASL mechanism"
    )
    tls: bool = Field(default=False, description="whether to connect over TLS")
    ca: Path | None = Field(default=None, description="a PEM file with the certificate authorities to trust")
    options: dict[str, str] = Field(
        default_factory=dict, description="other librdkafka options, such as linger.ms: '50'"
    )

    @field_validator("options")
    @classmethod
    def _no_secrets(cls, options: dict[str, str]) -> dict[str, str]:
        for name in options:
            if "password" in name or name.endswith((".pem", "secret")):
                raise ValueError(f"{name} would show in logs: name a file, or use password_file")
        return options

    def secret(self) -> Secret | None:
        """Read and return the password, None if none is set. Raises ValueError."""
        return one_secret(self.password, self.password_file, self.password_env, "password")

    def client_options(self, servers: str, password: Secret | None) -> dict[str, Any]:
        """Return the options of all clients. They contain the password, so pass them only to the library."""
        security = f"{'SASL_' if self.user else ''}{'SSL' if self.tls or self.ca else 'PLAINTEXT'}"
        client_options: dict[str, Any] = {
            "bootstrap.servers": servers,
            "client.id": "penstock",
            "security.protocol": security,
            "log_level": 0,
        }
        if self.ca is not None:
            client_options["ssl.ca.location"] = str(self.ca)
        if self.user is not None:
            client_options |= {
                "sasl.mechanism": self.mechanism,
                "sasl.username": self.user,
                "sasl.password": password.reveal() if password else "",
            }
        return client_options | self.options
