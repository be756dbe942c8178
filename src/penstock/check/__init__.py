# SPDX-License-Identifier: Apache-2.0
"""Checks of a server's settings and tables for anything that would break capture or hide changes."""
