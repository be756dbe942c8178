# SPDX-License-Identifier: Apache-2.0
"""Binlog files for benchmarks: a module per workload, found by name; `corpus` caches the files."""
