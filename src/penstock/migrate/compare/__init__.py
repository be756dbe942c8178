# SPDX-License-Identifier: Apache-2.0
"""Compares what Canal delivers from a server with what Penstock reads from it."""
