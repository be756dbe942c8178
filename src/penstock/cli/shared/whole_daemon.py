# SPDX-License-Identifier: Apache-2.0
"""Queries a daemon over HTTP, for commands that concern the whole daemon instead of a single instance."""

import json as json_text
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import penstock.errors
from penstock.cli.shared.chosen_daemon import daemon_address
from penstock.errors import AuthenticationFailed, ConnectionLost, OptionInvalid, PenstockError, SourceMissing
from penstock.model import Secret

_ANSWER_SECONDS_MAX = 10.0


class WholeDaemon:
    """A daemon that is queried over HTTP."""

    def __init__(self, url: str, token: Secret | None, context: ssl.SSLContext | None) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._context = context

    @classmethod
    def find(cls, url: str | None, config: Path | None, ca: Path | None = None) -> "WholeDaemon":
        """Return the daemon selected by the options. Raises OptionInvalid."""
        address = daemon_address("all", url, config, ca)
        if address.tls is None:
            return cls(address.base_urls[0], address.token, None)
        from penstock.source.daemon_client import tls_context

        return cls(address.base_urls[0], address.token, tls_context(address.tls))

    def instances(self, name: str | None) -> list[dict[str, Any]]:
        """Return the status of one instance or of all. Raises ConnectionLost and the daemon's errors."""
        statuses: list[dict[str, Any]] = self._ask("/v1/status")["instances"]
        chosen = [status for status in statuses if name in (None, status["instance"])]
        if not chosen:
            names = ", ".join(status["instance"] for status in statuses)
            raise SourceMissing(f"there is no instance {name!r}", hint=f"The instances here are: {names}")
        return chosen

    def only_instance(self) -> str:
        """Return the name of the daemon's instance. Raises OptionInvalid if the daemon has several."""
        names = [str(status["instance"]) for status in self.instances(None)]
        if len(names) > 1:
            raise OptionInvalid(
                "the daemon has several instances", hint=f"Choose one of --instance {', '.join(names)}"
            )
        return names[0]

    def listeners(self) -> dict[str, str]:
        """Return the daemon's listeners: the host:port of each listener by name."""
        listeners: dict[str, str] = self._ask("/v1/listeners")["listeners"]
        return listeners

    def alerts(self) -> dict[str, Any]:
        """Return the channel of the daemon's alerts, None without a channel, and the conditions that are true
        now.
        """
        return self._ask("/v1/alerts")

    def fleet(self) -> dict[str, Any]:
        """Return the state of the daemon's fleet. Raises SourceMissing if the daemon belongs to no fleet."""
        return self._ask("/v1/fleet")

    def _ask(self, path: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._token.reveal()}"} if self._token else {}
        request = urllib.request.Request(self._url + path, headers=headers)
        try:
            with urllib.request.urlopen(
                request, timeout=_ANSWER_SECONDS_MAX, context=self._context
            ) as answer:
                value: dict[str, Any] = json_text.load(answer)
                return value
        except urllib.error.HTTPError as problem:
            raise _problem_of(problem.read(), f"{self._url} answers {problem.code}") from problem
        except (OSError, ValueError) as problem:
            reason = getattr(problem, "reason", problem)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise AuthenticationFailed(
                    f"{self._url} cannot be trusted: {reason.verify_message}",
                    hint="Give its settings with --config, or its authority with --ca ca.pem",
                ) from problem
            from penstock.source.daemon_client import lost_hint

            raise ConnectionLost(
                f"{self._url} does not answer: {reason}",
                hint=lost_hint(self._url, reason, "Is the daemon running? Name it with --url or --config"),
            ) from problem


def _problem_of(body: bytes, default: str) -> PenstockError:
    """Return the error that a daemon reported, as an instance of its class."""
    try:
        report = json_text.loads(body)
    except ValueError:
        report = {}
    kind = getattr(penstock.errors, str(report.get("type")), ConnectionLost)
    return kind(
        str(report.get("detail") or default), position=report.get("position"), hint=report.get("hint")
    )
