# SPDX-License-Identifier: Apache-2.0
"""Pipelines in one process: the engine's tasks in threads, and rows regrouped in memory or on the disk."""
