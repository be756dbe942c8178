# SPDX-License-Identifier: Apache-2.0
"""Binlog files to measure on: one module per workload, found by name; `corpus` makes and keeps the files."""
