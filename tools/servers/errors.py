# SPDX-License-Identifier: Apache-2.0
"""The two reasons why a server is unavailable: this machine cannot provide it, or it fails."""


class PartMissing(RuntimeError):
    """The part is unavailable on this machine; the message says which part is missing and how to get it."""


class ServerFailed(RuntimeError):
    """A server or one of its programs failed; the message ends with its output."""
