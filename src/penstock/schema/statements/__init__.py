# SPDX-License-Identifier: Apache-2.0
"""Parses logged statements to determine how they change table definitions and rows."""
