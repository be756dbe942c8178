# SPDX-License-Identifier: Apache-2.0
"""Serving a log to remote readers: the listeners, and one module for each protocol."""
