# SPDX-License-Identifier: Apache-2.0
"""Parsing of logged statements, as far as they change table definitions or rows."""
