# SPDX-License-Identifier: Apache-2.0
"""Verifies that a pipeline's target equals its source, and repairs differences.

`comparison` compares, `touched` records what the log changed after a position, `report` stores the result,
and `repair` corrects the target.
"""
