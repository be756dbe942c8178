# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: files a real server wrote, peers beside Penstock in the same run, and the targets they are
held to.
"""
