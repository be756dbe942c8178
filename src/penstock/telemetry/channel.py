# SPDX-License-Identifier: Apache-2.0
"""The channel of alerts: one webhook or one mail server."""

import json
import smtplib
import ssl
import time
from email.message import EmailMessage
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError

from penstock.errors import ConnectionLost, OptionInvalid, PenstockError
from penstock.model import Secret, is_loopback
from penstock.settings.alerts import FORMATS, PORTS, AlertSettings, MailSettings
from penstock.settings.values import one_secret
from penstock.telemetry.alerts import Alert, Notification

_SECONDS_MAX = 10.0
# How many characters of the response are shown if a receiver refuses.
_SHOWN_MAX = 300
# If these chat services refuse a message, they still answer with status 200, and one of these fields contains
# a number other than 0. For other receivers, any of these may mean success.
_CODE_FIELDS = {"dingtalk": ("errcode",), "wecom": ("errcode",), "feishu": ("code", "StatusCode")}
_HINT_MAIL = "Check alerts.mail, then: penstock alerts test --config penstock.yaml"
_REFUSALS = (
    smtplib.SMTPResponseException,
    smtplib.SMTPRecipientsRefused,
    smtplib.SMTPNotSupportedError,
)


class Channel:
    """Delivers notifications by webhook or mail. `address` names the destination without credentials."""

    def __init__(self, settings: AlertSettings) -> None:
        self._settings = settings
        if settings.webhook is not None:
            self.address = str(urlsplit(settings.webhook.reveal()).hostname)
        else:
            assert settings.mail is not None, "the settings have one channel"
            self.address = ", ".join(settings.mail.to)

    def send(self, notification: Notification) -> None:
        """Deliver a notification. Raises ConnectionLost, and OptionInvalid if the receiver refuses it."""
        if self._settings.mail is not None:
            _send_mail(self._settings.mail, notification, self.address)
        else:
            self._post(notification)

    def send_test(self, sender: str) -> None:
        """Deliver a test alert, and its end. Propagates errors from `send`."""
        now_us = time.time_ns() // 1000
        alert = Alert("test", "test", f"{sender} tests the alerts; nothing is wrong", None, now_us)
        for resolved in (False, True):
            self.send(Notification(alert, resolved))

    def body(self, notification: Notification) -> bytes:
        """Return the body of a request to the webhook."""
        template = self._settings.body or FORMATS.get(self._settings.format)
        if template is None:
            return json.dumps(notification.to_json()).encode()
        return template.replace("{text}", json.dumps(notification.text())).encode()

    def _post(self, notification: Notification) -> None:
        assert self._settings.webhook is not None, "the settings have one channel"
        try:
            answer = urllib3.request(
                "POST",
                self._settings.webhook.reveal(),
                body=self.body(notification),
                headers={"Content-Type": "application/json"},
                timeout=_SECONDS_MAX,
                retries=False,
                redirect=False,
            )
        except HTTPError as problem:
            # Leave out the error's text, because it may contain the URL, whose path is the credential.
            raise ConnectionLost(
                f"the webhook at {self.address} does not answer: {type(problem).__name__}"
            ) from None
        if not 200 <= answer.status < 300 or _refuses(self._settings.format, answer.data):
            shown = answer.data[:_SHOWN_MAX].decode(errors="replace")
            raise OptionInvalid(
                f"the webhook at {self.address} refused an alert with status {answer.status}: {shown}",
                hint="Check alerts.webhook and alerts.format: penstock alerts test --config penstock.yaml",
            )


def _refuses(format: str, content: bytes) -> bool:
    try:
        answer: Any = json.loads(content)
    except ValueError:
        return False
    codes = _CODE_FIELDS.get(format, ())
    return isinstance(answer, dict) and any(answer.get(code) not in (None, 0, "0") for code in codes)


def _send_mail(mail: MailSettings, notification: Notification, address: str) -> None:
    parts = urlsplit(mail.server)
    message = EmailMessage()
    message["From"], message["To"] = mail.sender, ", ".join(mail.to)
    # Use the first line only, because a line break would end the header.
    message["Subject"] = " ".join(notification.text().split("\n", 1)[0].split())
    message.set_content(notification.text())
    password = _password(mail)
    context = ssl.create_default_context()
    host, port = str(parts.hostname), parts.port or PORTS[parts.scheme]
    try:
        if parts.scheme == "smtps":
            session: smtplib.SMTP = smtplib.SMTP_SSL(host, port, timeout=_SECONDS_MAX, context=context)
        else:
            session = smtplib.SMTP(host, port, timeout=_SECONDS_MAX)
        with session:
            session.ehlo()
            if parts.scheme == "smtp" and session.has_extn("starttls"):
                session.starttls(context=context)
            elif parts.scheme == "smtp" and mail.user is not None and not is_loopback(host):
                raise OptionInvalid(
                    f"the mail server {host} offers no TLS for the password of {mail.user}",
                    hint="Write smtps://host:465, or leave out user",
                )
            if mail.user is not None and password is not None:
                _log_in(session, mail.user, password)
            session.send_message(message)
    except _REFUSALS as problem:
        raise _refused(host, address, problem) from problem
    except (OSError, smtplib.SMTPException) as problem:
        raise ConnectionLost(f"the mail server {host} does not answer: {problem}") from problem


def _password(mail: MailSettings) -> Secret | None:
    try:
        return one_secret(mail.password, mail.password_file, mail.password_env, "password")
    except ValueError as problem:
        # The file or variable of the secret existed when the settings were read, but no longer exists.
        raise OptionInvalid(f"alerts.mail: {problem}", hint=_HINT_MAIL) from problem


def _log_in(session: smtplib.SMTP, user: str, password: Secret) -> None:
    try:
        session.login(user, password.reveal())
    except UnicodeEncodeError:
        # Leave out the error's text, because it contains the password.
        raise OptionInvalid(
            "alerts.mail: the user or the password has a letter outside ASCII, which cannot be sent",
            hint=_HINT_MAIL,
        ) from None


def _refused(host: str, address: str, problem: Exception) -> PenstockError:
    return OptionInvalid(
        f"the mail server {host} refused mail to {address}: {problem}",
        hint=_HINT_MAIL,
    )
