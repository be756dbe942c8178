# SPDX-License-Identifier: Apache-2.0
"""The two reasons why a server is unavailable: this machine cannot provide it, or it fails."""


class PartMissing(RuntimeError):
    """Something that a server needs is unavailable on this machine. The message says what is missing and how
    to get it.
    """


class ServerFailed(RuntimeError):
    """A server or one of its programs failed; the message ends with its output."""
