# SPDX-License-Identifier: Apache-2.0
"""DuckDB as a target."""
