# SPDX-License-Identifier: Apache-2.0
"""Pipelines in one process: the engine's tasks run in threads, and rows are regrouped in memory or on
disk.
"""
