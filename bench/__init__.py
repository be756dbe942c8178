# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: binlog files from a real server, peers measured beside Penstock, and performance targets."""
