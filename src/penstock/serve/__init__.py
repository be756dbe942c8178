# SPDX-License-Identifier: Apache-2.0
"""Serving a log to readers elsewhere: the listener, and one folder for each protocol."""
