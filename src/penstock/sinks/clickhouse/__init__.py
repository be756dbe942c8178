# SPDX-License-Identifier: Apache-2.0
"""ClickHouse as a target."""
