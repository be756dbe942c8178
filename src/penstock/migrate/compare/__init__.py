# SPDX-License-Identifier: Apache-2.0
"""Compares what Canal delivers of a server with what Penstock reads of it."""
