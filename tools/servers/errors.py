# SPDX-License-Identifier: Apache-2.0
"""The two ways in which a server cannot be had: this machine lacks it, or it is here and fails."""


class PartMissing(RuntimeError):
    """This machine cannot have the part: the message says what is missing and how to get it."""


class ServerFailed(RuntimeError):
    """A server or one of its programs failed; the message ends with what it printed."""
