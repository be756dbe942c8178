# SPDX-License-Identifier: Apache-2.0
"""Logged statements, read as far as they shape tables or change rows."""
