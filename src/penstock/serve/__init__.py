# SPDX-License-Identifier: Apache-2.0
"""Serving a log to remote readers: the listener, and one folder for each protocol."""
