# SPDX-License-Identifier: Apache-2.0
"""Peers of a TiDB cluster, for tests and benchmarks."""
