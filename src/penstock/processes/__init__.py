# SPDX-License-Identifier: Apache-2.0
"""Capture processes: each runs separately, so that a crash does not affect the daemon or other captures."""
