# SPDX-License-Identifier: Apache-2.0
"""Capture of a server's log: session, replica stream, schema history, precheck."""
