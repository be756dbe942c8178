# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: binlog files from a real server, comparisons with other programs (peers), and performance
targets.
"""
