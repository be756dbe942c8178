# SPDX-License-Identifier: Apache-2.0
"""Determines the columns of a row at a log position, from logged statements and table definitions."""
